"""Local SGD: the client triple that most methods share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientUpdate,
)
from fedjax_het.core.contract_checks import call_user_function, unpack_tuple
from fedjax_het.core.lr_schedules import make_step_lr_factor
from fedjax_het.core.optimizers import (
    LR_NAME,
    OPTIMIZERS,
    USER_OBJECT,
    LocalTrainingOptions,
    make_transformation,
)
from fedjax_het.core.task import Task
from fedjax_het.nn import Model, count_parameters
from fedjax_het.utils.errors import require

Tree = Any


SMALL_NETWORK_SIZE = (
    2**15
)  # weights of a network whose step takes less time than starting its operations


class LocalTraining(NamedTuple):
    """Static choices of local training; a method that condenses reads the task and the batch."""

    task: Task
    optimizer: str | None  # of OPTIMIZERS, or OWN
    local_epochs: int | None = 1
    keep_state: bool = False
    """Keep every client's optimiser state across rounds (as DynaFed's code does, where each
    client owns one Adam whose moments survive the weights' being overwritten) or reset it."""
    batch_size: int = 32
    evaluated_model: str = "global"
    """Which of a client's models its own test is for, of those that the method has: "global", or
    "client", its model after local training, which is then kept."""
    returns_client_models: bool = False
    """Whether a round gives all its clients' models to what refines the server's."""
    measures_drift: bool = False
    """Whether a round measures client drift, see `core.drift`."""
    options: LocalTrainingOptions = LocalTrainingOptions()

    @property
    def epochs(self) -> int:
        """The local epochs of clients that train by epochs; those that condense have none."""
        assert self.local_epochs is not None
        return self.local_epochs


class AccumulatedGradient(NamedTuple):
    """An optimiser's state where a step has several minibatches."""

    optimizer_state: Tree
    gradient_sum: Tree  # of the gradients since its last step
    num_gradients: jax.Array  # [] int32: how many they are


class ServerMessage(NamedTuple):
    """What the server sends every client of a round."""

    variables: Tree
    """Variables of the global model: `{"params": ..., "state": ...}` with the weights and the
    batch-norm statistics."""
    extra: Tree = ()
    "What the method sends besides; `()` for nothing."


class ClientTrainState(NamedTuple):
    """A client in training."""

    variables: Tree
    "Variables of the client's model."
    optimizer_state: Tree
    "State of the local optimizer."
    aux: Tree
    "What the method itself carries from step to step; `()` for nothing."


def keep_gradient(
    context: ClientContext, gradient: Tree, local: ClientTrainState, batch: Batch
) -> tuple[Tree, Tree]:
    """Return the gradient and the method's accumulator as they are."""
    return gradient, local.aux


def begin_local_training(
    training: LocalTraining, hp, variables: Tree, kept_optimizer_state: Tree, aux: Tree = ()
):
    """A client at the start of a round; `kept` is its optimiser's state, if that is kept."""
    optimizer_state = (
        kept_optimizer_state
        if training.keep_state
        else init_local_optimizer(training, hp, variables)
    )
    return ClientTrainState(variables, optimizer_state, aux)


def init_local_optimizer(training: LocalTraining, hp, variables: Tree) -> Tree:
    """The state of a local optimiser that has not made a step."""
    params = variables["params"]
    state = _make_local_optimizer(training, hp).init(params)
    if training.options.accumulation_steps == 1:
        return state
    return AccumulatedGradient(state, jax.tree.map(jnp.zeros_like, params), jnp.int32(0))


def _make_local_optimizer(training: LocalTraining, hp) -> optax.GradientTransformation:
    name, options = training.optimizer, training.options
    assert name is not None, "clients that condense have none"
    lr_factor = (
        None if options.lr_schedule is None else make_step_lr_factor(options.lr_schedule, hp)
    )
    optimizer = make_transformation(name, options, hp, lr_factor)
    # Of a small network all that is kept is one row: a step, and what is done with clients' states,
    # are then a few operations, not a few for each layer (with Adam a program of 70 % the size,
    # compiled and run in 4/5 of the time; large networks, whose rows are copied, lose as much).
    # An optimiser that keeps nothing has nothing to gain.
    is_flattened = (
        name != USER_OBJECT
        and OPTIMIZERS[name].is_elementwise
        and _is_small_network(training.task.model)
    )
    return optax.flatten(optimizer) if is_flattened else optimizer


@functools.lru_cache(maxsize=64)
def _is_small_network(model: Model) -> bool:
    return count_parameters(jax.eval_shape(model.init, jax.random.key(0))) <= SMALL_NETWORK_SIZE


def select_kept_optimizer_state(training: LocalTraining, optimizer_state: Tree) -> Tree:
    """What of an optimiser's state a client keeps between rounds."""
    return optimizer_state if training.keep_state else ()


def apply_gradient(
    training: LocalTraining,
    context: ClientContext,
    variables: Tree,
    gradient: Tree,
    optimizer_state: Tree,
    batch: Batch,
) -> tuple[Tree, Tree]:
    """Make one step of the local optimizer.

    With the setting `accumulation_steps` > 1 a call adds the gradient of one minibatch. The step is
    made along the mean of the collected gradients, when there are enough of them or at the client's
    last minibatch of the round.

    Args:
      training: the choices of local training, with the optimizer.
      context: the context of the method's `step`.
      variables: variables of the model, `{"params": ..., "state": ...}`.
      gradient: gradient of the loss, like `variables["params"]`.
      optimizer_state: state of the optimizer, as in `ClientTrainState.optimizer_state`.
      batch: the minibatch of the method's `step`.

    Returns:
      The variables with new parameters, and the new state of the optimizer.
    """
    params, accumulation_steps = variables["params"], training.options.accumulation_steps
    update = _make_local_optimizer(training, context.hp).update
    if accumulation_steps == 1:
        updates, optimizer_state = update(gradient, optimizer_state, params)
        return {**variables, "params": optax.apply_updates(params, updates)}, optimizer_state
    gradient_sum = jax.tree.map(jnp.add, optimizer_state.gradient_sum, gradient)
    num_gradients = optimizer_state.num_gradients + 1

    def apply_step(params, state):
        mean = jax.tree.map(lambda g: g / num_gradients, gradient_sum)
        updates, state = update(mean, state, params)
        zero_gradient = jax.tree.map(jnp.zeros_like, gradient_sum)
        return optax.apply_updates(params, updates), AccumulatedGradient(
            state, zero_gradient, jnp.int32(0)
        )

    def accumulate(params, state):
        return params, AccumulatedGradient(state, gradient_sum, num_gradients)

    is_due = (num_gradients == accumulation_steps) | (
        batch.step_index + 1 == context.client.num_steps
    )
    params, optimizer_state = jax.lax.cond(
        is_due, apply_step, accumulate, params, optimizer_state.optimizer_state
    )
    return {**variables, "params": params}, optimizer_state


def count_optimizer_steps(training: LocalTraining, num_minibatches: Any) -> Any:
    """Steps of the local optimiser in a round of so many minibatches."""
    accumulation_steps = training.options.accumulation_steps
    return num_minibatches if accumulation_steps == 1 else -(-num_minibatches // accumulation_steps)


def with_plain_sgd(training: LocalTraining) -> LocalTraining:
    """The same with steps of SGD alone."""
    return training._replace(optimizer="sgd", keep_state=False, options=LocalTrainingOptions())


def require_constant_lr(training: LocalTraining, reason: str) -> None:
    """Raise ConfigError unless every local step is of the rate `local_lr`, which a method reads
    itself. why: in a few words what of."""
    schedule, hp_names = training.options.lr_schedule, training.options.optional_hyperparameters
    require(schedule is None, "lr_step_schedule", schedule, f"none: {reason}")
    has_lr = training.optimizer != USER_OBJECT or LR_NAME in hp_names
    require(
        has_lr, f"hp {LR_NAME}", None, f"a number, beside the optimizer that is passed: {reason}"
    )


def make_training_step(
    training: LocalTraining,
    adjust: Callable = keep_gradient,
    loss_and_gradient: Callable | None = None,
) -> Callable:
    """Return the `step` of a `ClientAlgorithm` that moves `local.variables` along a gradient.

    Args:
      training: the choices of local training.
      adjust: `adjust(context, gradient, local, batch) -> (gradient, aux)`: the gradient that the
        local optimizer uses, and the new `local.aux`.
      loss_and_gradient: `loss_and_gradient(context, local, batch) -> (loss, gradient, variables)` of
        a minibatch, with new batch-norm statistics. Default: cross-entropy, `Task.loss_and_gradient`.

    Returns:
      `step(context, local, batch) -> (local, loss)` with a `ClientTrainState` for `local`.
    """

    def cross_entropy_and_gradient(context, local, batch):
        return training.task.loss_and_gradient(local.variables, batch, context.key)

    compute = loss_and_gradient or cross_entropy_and_gradient

    def step(context, local, batch):
        loss, gradient, variables = compute(context, local, batch)
        outputs = call_user_function(
            "adjust", adjust, context=context, gradient=gradient, local=local, batch=batch
        )
        gradient, aux = unpack_tuple("adjust", outputs, ("gradient", "aux"))
        variables, optimizer_state = apply_gradient(
            training, context, variables, gradient, local.optimizer_state, batch
        )
        return ClientTrainState(variables, optimizer_state, aux), loss

    return step


def add_proximal_gradient(gradient: Tree, params: Tree, anchor: Tree, strength) -> Tree:
    """The gradient of f + strength / 2 ||params - anchor||^2, given that of f."""
    return jax.tree.map(lambda g, w, a: g + strength * (w - a), gradient, params, anchor)


def make_local_sgd(
    training: LocalTraining,
    *,
    adjust: Callable = keep_gradient,
    loss_and_gradient: Callable | None = None,
) -> ClientAlgorithm:
    """Return FedAvg's client: it steps along the gradient and sends the change of its variables.

    `ClientUpdate.mean` is client - server over all variables, so that batch-norm statistics are
    averaged like weights. The client stores the optimizer's state, if `training.keep_state`.

    Args:
      training: the choices of local training.
      adjust: how a method changes the gradient of every step; see `make_training_step`.
      loss_and_gradient: loss of every step; see `make_training_step`.
    """

    def init(hp, variables):
        return select_kept_optimizer_state(training, init_local_optimizer(training, hp, variables))

    def begin(context, state):
        return begin_local_training(training, context.hp, context.message.variables, state)

    def end(context, local, state):
        change = jax.tree.map(jnp.subtract, local.variables, context.message.variables)
        return (
            ClientUpdate(mean=change),
            select_kept_optimizer_state(training, local.optimizer_state),
            (),
        )

    step = make_training_step(training, adjust, loss_and_gradient)
    return ClientAlgorithm(init, begin, step, end)


def make_local_model_training(training: LocalTraining) -> ClientAlgorithm:
    """Plain local training of a copy of the model received, of which the client keeps all: its
    state is the model, and nothing is sent."""

    def begin(context, state):
        optimizer_state = init_local_optimizer(training, context.hp, context.message.variables)
        return ClientTrainState(context.message.variables, optimizer_state, ())

    def end(context, local, state):
        return ClientUpdate(), local.variables, ()

    return ClientAlgorithm(
        lambda hp, variables: variables, begin, make_training_step(training), end
    )
