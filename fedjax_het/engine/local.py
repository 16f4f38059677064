"""Local SGD: the client triple that most methods share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.common.errors import require
from fedjax_het.engine.contract import Batch, Client, ClientMethod, ContractError, Upload
from fedjax_het.engine.optimizers import OPTIMIZERS, OWN, RATE, Details, transformation
from fedjax_het.engine.rate_schedules import step_factor
from fedjax_het.engine.task import Task
from fedjax_het.nn import Model, count_parameters

Tree = Any


SMALL = 2**15  # weights of a network whose step takes less time than starting its operations


class LocalTraining(NamedTuple):
    """Static choices of local training; a method that condenses reads the task and the batch."""

    task: Task
    optimizer: str | None  # of OPTIMIZERS, or OWN
    local_epochs: int | None = 1
    keep_state: bool = False
    """Keep every client's optimiser state across rounds (as DynaFed's code does, where each
    client owns one Adam whose moments survive the weights' being overwritten) or reset it."""
    batch_size: int = 32
    scored: str = "global"
    """Which of a client's models its own test is for, of those that the method has: "global", or
    "client", its model after local training, which is then kept."""
    hands_out_models: bool = False
    """Whether a round gives all its clients' models to what refines the server's."""
    details: Details = Details()

    @property
    def epochs(self) -> int:
        """The local epochs of clients that train by epochs; those that condense have none."""
        assert self.local_epochs is not None
        return self.local_epochs


class Accumulated(NamedTuple):
    """An optimiser's state where a step has several minibatches."""

    optimizer: Tree
    total: Tree  # of the gradients since its last step
    number: jax.Array  # [] int32: how many they are


class Broadcast(NamedTuple):
    """What the server sends every client of a round."""

    variables: Tree
    extra: Tree = ()


class Local(NamedTuple):
    """A client in training."""

    variables: Tree
    optimizer: Tree
    memory: Tree  # a method's own accumulator; () if none


def no_adjustment(hp, gradient, local, broadcast, batch, client):
    return gradient, local.memory


def begin_training(training: LocalTraining, hp, variables: Tree, kept: Tree, memory: Tree = ()):
    """A client at the start of a round; `kept` is its optimiser's state, if that is kept."""
    optimizer = kept if training.keep_state else new_optimizer(training, hp, variables)
    return Local(variables, optimizer, memory)


def new_optimizer(training: LocalTraining, hp, variables: Tree) -> Tree:
    """The state of a local optimiser that has not made a step."""
    params = variables["params"]
    state = _optimizer(training, hp).init(params)
    if training.details.accumulation == 1:
        return state
    return Accumulated(state, jax.tree.map(jnp.zeros_like, params), jnp.int32(0))


def _optimizer(training: LocalTraining, hp) -> optax.GradientTransformation:
    name, details = training.optimizer, training.details
    assert name is not None, "clients that condense have none"
    factor = None if details.schedule is None else step_factor(details.schedule, hp)
    optimizer = transformation(name, details, hp, factor)
    # Of a small network all that is kept is one row: a step, and what is done with clients' states,
    # are then a few operations, not a few for each layer (with Adam a program of 70 % the size,
    # compiled and run in 4/5 of the time; large networks, whose rows are copied, lose as much).
    # An optimiser that keeps nothing has nothing to gain.
    flat = name != OWN and OPTIMIZERS[name].flat and _is_small(training.task.model)
    return optax.flatten(optimizer) if flat else optimizer


@functools.lru_cache(maxsize=64)
def _is_small(model: Model) -> bool:
    return count_parameters(jax.eval_shape(model.init, jax.random.key(0))) <= SMALL


def kept_optimizer(training: LocalTraining, optimizer: Tree) -> Tree:
    """What of an optimiser's state a client keeps between rounds."""
    return optimizer if training.keep_state else ()


def descend(
    training: LocalTraining,
    hp,
    variables: Tree,
    gradient: Tree,
    optimizer: Tree,
    at: tuple[Batch, Client] | None = None,
):
    """One step of the local optimiser -> (variables, optimiser's state).

    Where a step has several minibatches (the setting `accumulation`) this adds one to it, and the
    step is made along the mean of their gradients when they are there; what is left at a client's
    last minibatch of the round is a step of fewer. `at`: which minibatch of which client this is,
    as the method's `step` gets them, which is needed then.
    """
    params, most = variables["params"], training.details.accumulation
    update = _optimizer(training, hp).update
    if most == 1:
        updates, optimizer = update(gradient, optimizer, params)
        return {**variables, "params": optax.apply_updates(params, updates)}, optimizer
    if at is None:
        raise ContractError("descend: expected at=(batch, client), since steps are accumulated")
    batch, client = at
    total = jax.tree.map(jnp.add, optimizer.total, gradient)
    count = optimizer.number + 1

    def step(params, state):
        mean = jax.tree.map(lambda g: g / count, total)
        updates, state = update(mean, state, params)
        nothing = jax.tree.map(jnp.zeros_like, total)
        return optax.apply_updates(params, updates), Accumulated(state, nothing, jnp.int32(0))

    def wait(params, state):
        return params, Accumulated(state, total, count)

    due = (count == most) | (batch.number + 1 == client.num_steps)
    params, optimizer = jax.lax.cond(due, step, wait, params, optimizer.optimizer)
    return {**variables, "params": params}, optimizer


def optimizer_steps(training: LocalTraining, minibatches: Any) -> Any:
    """Steps of the local optimiser in a round of so many minibatches."""
    most = training.details.accumulation
    return minibatches if most == 1 else -(-minibatches // most)


def plain_sgd(training: LocalTraining) -> LocalTraining:
    """The same with steps of SGD alone."""
    return training._replace(optimizer="sgd", keep_state=False, details=Details())


def require_one_rate(training: LocalTraining, why: str) -> None:
    """Raise ConfigError unless every local step is of the rate `local_lr`, which a method reads
    itself. why: in a few words what of."""
    schedule, given = training.details.schedule, training.details.numbers
    require(schedule is None, "lr_step_schedule", schedule, f"none: {why}")
    known = training.optimizer != OWN or RATE in given
    require(known, f"hp {RATE}", None, f"a number, beside the optimizer that is passed: {why}")


def training_step(training: LocalTraining, adjust: Callable = no_adjustment) -> Callable:
    """The step of a `ClientMethod` that moves `local.variables` along the adjusted gradient.

    `adjust(hp, gradient, local, broadcast, batch, client)` returns the gradient that the optimiser
    sees and the new `local.memory`.
    """

    def step(hp, broadcast, local, batch, client, key):
        loss, gradient, variables = training.task.loss_and_gradient(local.variables, batch, key)
        gradient, memory = adjust(hp, gradient, local, broadcast, batch, client)
        variables, optimizer = descend(
            training, hp, variables, gradient, local.optimizer, (batch, client)
        )
        return Local(variables, optimizer, memory), loss

    return step


def pulled(gradient: Tree, params: Tree, anchor: Tree, strength) -> Tree:
    """The gradient of f + strength / 2 ||params - anchor||^2, given that of f."""
    return jax.tree.map(lambda g, w, a: g + strength * (w - a), gradient, params, anchor)


def local_sgd(training: LocalTraining, *, adjust: Callable = no_adjustment) -> ClientMethod:
    """Plain local training: step along the gradient, send back the change of the variables.

    Methods differ in `adjust`, see `training_step`.

    Upload: the mean of client - server over all variables, so that batch-norm statistics are
    averaged like weights. State: the optimiser's, if it is kept.
    """

    def init(hp, variables):
        return kept_optimizer(training, new_optimizer(training, hp, variables))

    def begin(hp, broadcast, state, client):
        return begin_training(training, hp, broadcast.variables, state)

    def end(hp, broadcast, local, state, client):
        change = jax.tree.map(jnp.subtract, local.variables, broadcast.variables)
        return Upload(mean=change), kept_optimizer(training, local.optimizer), ()

    return ClientMethod(init, begin, training_step(training, adjust), end)


def whole_model(training: LocalTraining) -> ClientMethod:
    """Plain local training of a copy of the model received, of which the client keeps all: its
    state is the model, and nothing is sent."""

    def begin(hp, broadcast, state, client):
        fresh = new_optimizer(training, hp, broadcast.variables)
        return Local(broadcast.variables, fresh, ())

    def end(hp, broadcast, local, state, client):
        return Upload(), local.variables, ()

    return ClientMethod(lambda hp, variables: variables, begin, training_step(training), end)
