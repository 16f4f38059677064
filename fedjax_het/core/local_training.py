"""Local SGD: the client functions that most methods share, from a round's start to its end."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation import Aggregation
from fedjax_het.attacks import UpdateAttack
from fedjax_het.compression import Compressor
from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientUpdate,
    HyperParameters,
)
from fedjax_het.core.contract_checks import call_user_function, require_like, unpack_tuple
from fedjax_het.core.optimizers import (
    AccumulatedGradient,
    LocalTrainingOptions,
    accumulate_gradient,
    make_local_optimizer,
)
from fedjax_het.core.private_gradients import PrivateStep, compute_private_gradient
from fedjax_het.core.task import Task
from fedjax_het.nn.model import Model
from fedjax_het.privacy import ExampleLevel, PrivacyMechanism
from fedjax_het.utils.errors import make_value_error

Tree = Any


class LocalTraining(NamedTuple):
    """Static choices of local training; a method that condenses data reads task and batch size.

    Example:
      >>> from fedjax_het.methods import LocalTraining
      >>> LocalTraining(task=None, optimizer="sgd", local_epochs=5).epochs
      5
    """

    task: Task
    "Network, normalization and loss."
    optimizer: str | None
    "One of `OPTIMIZERS`, or `USER_OBJECT`; None for methods that condense data."
    local_epochs: int | None = 1
    "Passes over a client's data per round; None for runs that set `local_steps`."
    keep_state: bool = False
    """Whether a client's optimizer state lasts from round to round, or is reset. In DynaFed's code
    each client owns one Adam whose moments survive the replacement of the weights."""
    batch_size: int = 32
    "Examples of a minibatch."
    evaluated_model: str = "global"
    """The client's model that its own test evaluates, among the method's models: "global", or
    "client", its model after local training, which is then stored."""
    returns_client_models: bool = False
    "Whether a round returns all its clients' models, for a server step that reads them."
    measures_drift: bool = False
    "Whether a round measures client drift, see `core.drift`."
    options: LocalTrainingOptions = LocalTrainingOptions()
    "Options of the optimizer, schedule of its rate, accumulation."
    local_parameters: Callable[[Model, Tree], Tree] | None = None
    "See `AlgorithmSpec.local_parameters`."
    regularizer: Callable[[HyperParameters, jax.Array, jax.Array], jax.Array] | None = None
    """`regularizer(hp, features, mask) -> term`: a scalar that every local step adds to its mean
    loss, of the features `[B, F]` and the mask `[B]` of the minibatch. None: no term."""
    compressor: Compressor | None = None
    "Compression of the clients' uploads; None: uploads are sent as they are."
    attacks: tuple[UpdateAttack, ...] = ()
    "Attacks of malicious clients on their updates."
    aggregations: tuple[Aggregation, ...] = ()
    "Rules by which the server combines the updates; none: the weighted mean."
    weigh_updates: Callable[..., jax.Array] | None = None
    """`weigh_updates(hp, variables, updates, cohort) -> factors`: float32 `[S]` by which the server
    scales the received updates before the rules; an update with the factor 0 is left out. None: the
    updates as they are."""
    privacy: PrivacyMechanism | None = None
    "Differential privacy of the clients' uploads; None: none."
    expected_cohort_size: float = 1.0
    "Expected number of clients of a round, by which client-level privacy divides their sum."

    def with_plain_uploads(self) -> "LocalTraining":
        """Return local training whose uploads are sent, received and averaged as they are."""
        plain: dict[str, Any] = {"compressor": None, "attacks": (), "aggregations": ()}
        return self._replace(**plain, weigh_updates=None, privacy=None)

    @property
    def epochs(self) -> int:
        """The local epochs of clients that train by epochs; clients that condense have none."""
        assert self.local_epochs is not None
        return self.local_epochs

    def loss_and_gradient(
        self, context: ClientContext, variables: Tree, batch: Batch, **arguments: Any
    ) -> tuple[jax.Array, Tree, Tree]:
        """Compute the loss of a local step: `Task.loss_and_gradient` with the regularizer.

        With example-level privacy the gradient is clipped and noisy, see
        `compute_private_gradient`.

        Args:
          context: the context of the method's `step`.
          variables: variables of the model, `{"params": ..., "state": ...}`.
          batch: the minibatch of the method's `step`.
          **arguments: further arguments of `Task.loss_and_gradient`.

        Returns:
          The loss, the gradient, and the variables with new batch-norm statistics.
        """
        if isinstance(self.privacy, ExampleLevel):
            if arguments or self.regularizer is not None:
                expected = "a method whose clients train by the plain loss of each example"
                raise make_value_error("privacy", self.privacy.name, expected)
            return compute_private_gradient(self.task, self.privacy, variables, batch, context.key)
        if self.regularizer is not None:
            arguments["regularizer"] = partial(self.regularizer, context.hp)
        return self.task.loss_and_gradient(variables, batch, context.key, **arguments)


class ServerMessage(NamedTuple):
    """The server's message to every client of a round.

    Example:
      >>> from fedjax_het.methods import ServerMessage
      >>> ServerMessage({"params": 1.0, "state": {}}).extra
      ()
    """

    variables: Tree
    """Variables of the global model: `{"params": ..., "state": ...}` with the weights and the
    batch-norm statistics."""
    extra: Tree = ()
    "Further arrays of the method; `()` for nothing."


class ClientTrainState(NamedTuple):
    """A client in training.

    Attributes:
      variables: variables of the client's model, `{"params": ..., "state": ...}`.
      optimizer_state: state of the local optimizer.
      aux: arrays that the method itself carries from step to step; `()` for nothing.

    Example:
      >>> from fedjax_het.methods import ClientTrainState
      >>> state = ClientTrainState({"params": 1.0, "state": {}}, optimizer_state=(), aux=())
      >>> state._replace(aux=3).aux
      3
    """

    variables: Tree
    optimizer_state: Tree
    aux: Tree


def _keep_gradient(context, gradient: Tree, local: ClientTrainState, batch) -> tuple[Tree, Tree]:
    return gradient, local.aux


def make_local_sgd(
    training: LocalTraining,
    *,
    adjust: Callable = _keep_gradient,
    loss_and_gradient: Callable | None = None,
) -> ClientAlgorithm:
    """Build FedAvg's client: it steps along the gradient and sends the change of its variables.

    `ClientUpdate.mean` is client - server over all variables, so that batch-norm statistics are
    averaged like weights. The client stores the optimizer's state, if `training.keep_state`.

    Args:
      training: the choices of local training.
      adjust: how a method changes the gradient of every step; see `make_training_step`.
      loss_and_gradient: loss of every step; see `make_training_step`.

    Returns:
      The functions of the client.

    Example:
      >>> from fedjax_het.core.local_training import LocalTraining, make_local_sgd
      >>> from fedjax_het.core.task import Task
      >>> from fedjax_het.nn import make_model
      >>> task = Task(make_model("mlp", (2, 2, 1), 3), mean=(0.5,), std=(0.5,))
      >>> make_local_sgd(LocalTraining(task, "sgd")).extra_passes
      0
    """

    def init(hp, variables):
        return select_kept_optimizer_state(training, init_local_optimizer(training, hp, variables))

    def begin(context, state):
        return begin_local_training(training, context.hp, context.message.variables, state)

    def end(context, local, state):
        change = jax.tree.map(jnp.subtract, local.variables, context.message.variables)
        kept_state = select_kept_optimizer_state(training, local.optimizer_state)
        return ClientUpdate(mean=change), kept_state, ()

    step = make_training_step(training, adjust, loss_and_gradient)
    return ClientAlgorithm(init, begin, step, end)


def make_training_step(
    training: LocalTraining,
    adjust: Callable = _keep_gradient,
    loss_and_gradient: Callable | None = None,
) -> Callable:
    """Build the `step` of a `ClientAlgorithm` that moves `local.variables` along a gradient.

    Args:
      training: the choices of local training.
      adjust: `adjust(context, gradient, local, batch) -> (gradient, aux)`: the gradient that the
        local optimizer uses, and the new `local.aux`.
      loss_and_gradient: `loss_and_gradient(context, local, batch) -> (loss, gradient, variables)`
        of a minibatch, with new batch-norm statistics. Default: cross-entropy,
        `LocalTraining.loss_and_gradient`.

    Returns:
      `step(context, local, batch) -> (local, loss)` with a `ClientTrainState` for `local`.

    Example:
      >>> from fedjax_het.methods import LocalTraining, make_local_sgd, make_training_step
      >>> training = LocalTraining(task=None, optimizer="sgd")
      >>> make_local_sgd(training)._replace(step=make_training_step(training)).extra_passes
      0
    """

    def cross_entropy_and_gradient(context, local, batch):
        return training.loss_and_gradient(context, local.variables, batch)

    compute_gradient = loss_and_gradient or cross_entropy_and_gradient

    def step(context, local, batch):
        outputs = call_user_function(
            "loss_and_gradient", compute_gradient, context=context, local=local, batch=batch
        )
        parts = ("loss", "gradient", "variables")
        loss, gradient, variables = unpack_tuple("loss_and_gradient", outputs, parts)
        origin = "the model's parameters have"
        require_like("loss_and_gradient: gradient", gradient, variables["params"], origin)
        outputs = call_user_function(
            "adjust", adjust, context=context, gradient=gradient, local=local, batch=batch
        )
        gradient, aux = unpack_tuple("adjust", outputs, ("gradient", "aux"))
        require_like("adjust: gradient", gradient, variables["params"], origin)
        variables, optimizer_state = apply_gradient(
            training, context, variables, gradient, local.optimizer_state, batch
        )
        return ClientTrainState(variables, optimizer_state, aux), loss

    if isinstance(training.privacy, ExampleLevel) and loss_and_gradient is None:
        return PrivateStep(step)
    return step


def apply_gradient(
    training: LocalTraining,
    context: ClientContext,
    variables: Tree,
    gradient: Tree,
    optimizer_state: Tree,
    batch: Batch,
) -> tuple[Tree, Tree]:
    """Make one step of the local optimizer.

    With the setting `gradient_accumulation` > 1 a call adds the gradient of one minibatch, see
    `accumulate_gradient`.

    Args:
      training: the choices of local training, with the optimizer.
      context: the context of the method's `step`.
      variables: variables of the model, `{"params": ..., "state": ...}`.
      gradient: gradient of the loss, like `variables["params"]`.
      optimizer_state: state of the optimizer, as in `ClientTrainState.optimizer_state`.
      batch: the minibatch of the method's `step`.

    Returns:
      The variables with new parameters, and the new state of the optimizer.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import (
      ...     ClientContext, LocalTraining, Task, apply_gradient, init_local_optimizer,
      ... )
      >>> from fedjax_het.nn import make_model
      >>> training = LocalTraining(Task(make_model("mlp", (4, 4, 1), 3), (0.0,), (1.0,)), "sgd")
      >>> variables = {"params": {"w": jnp.ones(2)}, "state": {}}
      >>> hp = {"local_lr": jnp.float32(0.5)}
      >>> context = ClientContext(hp, message=(), client=None, key=None)
      >>> state = init_local_optimizer(training, hp, variables)
      >>> gradient = {"w": jnp.ones(2)}
      >>> new, _ = apply_gradient(training, context, variables, gradient, state, batch=None)
      >>> new["params"]["w"].tolist()
      [0.5, 0.5]
    """
    params, optimizer = variables["params"], _make_local_optimizer(training, context.hp)
    if training.options.accumulation_steps == 1:
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return {**variables, "params": optax.apply_updates(params, updates)}, optimizer_state
    is_last = batch.step_index + 1 == context.client.num_steps
    params, optimizer_state = accumulate_gradient(
        training.options.accumulation_steps, optimizer, params, gradient, optimizer_state, is_last
    )
    return {**variables, "params": params}, optimizer_state


def begin_local_training(
    training: LocalTraining, hp, variables: Tree, kept_optimizer_state: Tree, aux: Tree = ()
) -> ClientTrainState:
    """Return a client at the start of a round.

    Args:
      training: the choices of local training.
      hp: values of the hyperparameters by name.
      variables: variables of the model from which it starts.
      kept_optimizer_state: the client's stored optimizer state, if `training.keep_state`.
      aux: the method's own arrays.

    Returns:
      The client.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import LocalTraining, Task, begin_local_training
      >>> from fedjax_het.nn import make_model
      >>> training = LocalTraining(Task(make_model("mlp", (4, 4, 1), 3), (0.0,), (1.0,)), "sgd")
      >>> variables = {"params": {"w": jnp.ones(2)}, "state": {}}
      >>> begin_local_training(training, {"local_lr": 0.1}, variables, (), aux=0).aux
      0
    """
    optimizer_state = kept_optimizer_state
    if not training.keep_state:
        optimizer_state = init_local_optimizer(training, hp, variables)
    return ClientTrainState(variables, optimizer_state, aux)


def select_kept_optimizer_state(training: LocalTraining, optimizer_state: Tree) -> Tree:
    """Return the part of an optimizer's state that a client stores between rounds.

    Args:
      training: the choices of local training.
      optimizer_state: the state after the round.

    Returns:
      The state, or `()`.

    Example:
      >>> from fedjax_het.methods import LocalTraining, select_kept_optimizer_state
      >>> training = LocalTraining(task=None, optimizer="adam", keep_state=False)
      >>> select_kept_optimizer_state(training, {"mu": 0.0})
      ()
    """
    return optimizer_state if training.keep_state else ()


def init_local_optimizer(training: LocalTraining, hp, variables: Tree) -> Tree:
    """Return the state of a local optimizer before its first step.

    Args:
      training: the choices of local training.
      hp: values of the hyperparameters by name.
      variables: variables of the model, `{"params": ..., "state": ...}`.

    Returns:
      The state.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import LocalTraining, Task, init_local_optimizer
      >>> from fedjax_het.nn import make_model
      >>> training = LocalTraining(Task(make_model("mlp", (4, 4, 1), 3), (0.0,), (1.0,)), "adam")
      >>> state = init_local_optimizer(training, {"local_lr": 0.1}, {"params": {"w": jnp.ones(2)}})
      >>> max(leaf.size for leaf in jax.tree.leaves(state))
      2
    """
    params = variables["params"]
    state = _make_local_optimizer(training, hp).init(params)
    if training.options.accumulation_steps == 1:
        return state
    return AccumulatedGradient(state, jax.tree.map(jnp.zeros_like, params), jnp.int32(0))


def _make_local_optimizer(training: LocalTraining, hp) -> optax.GradientTransformation:
    assert training.optimizer is not None, "clients that condense have none"
    return make_local_optimizer(training.optimizer, training.options, hp)
