"""Local SGD: the client triple that most methods share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.common.records import Bounds, Number
from fedjax_het.engine.contract import ClientMethod, Upload
from fedjax_het.engine.task import Task
from fedjax_het.nn import Model, count_parameters

Tree = Any


class LocalOptimizer(NamedTuple):
    """An optimiser that clients may have: how it is made of `hp`, and the numbers that it reads."""

    make: Callable[[Any], optax.GradientTransformation]
    numbers: dict[str, Number]


def _rate(default: float) -> dict[str, Number]:
    return {"local_lr": Number(default, Bounds(0))}


SMALL = 2**15  # weights of a network whose step takes less time than starting its operations
OPTIMIZERS = {
    "sgd": LocalOptimizer(lambda hp: optax.sgd(hp["local_lr"]), _rate(0.01)),
    "momentum": LocalOptimizer(
        lambda hp: optax.sgd(hp["local_lr"], momentum=hp["local_momentum"]),
        {**_rate(0.01), "local_momentum": Number(0.9, Bounds(0, 1, open_high=True))},
    ),
    "adam": LocalOptimizer(lambda hp: optax.adam(hp["local_lr"]), _rate(1e-3)),
    "adamw": LocalOptimizer(
        lambda hp: optax.adamw(hp["local_lr"], weight_decay=hp["local_weight_decay"]),
        {**_rate(1e-3), "local_weight_decay": Number(1e-4, Bounds(0))},
    ),
}


def optimizer_numbers(name: str) -> dict[str, Number]:
    """The numeric hyper-parameters that a local optimiser reads."""
    return OPTIMIZERS[name].numbers


class LocalTraining(NamedTuple):
    """Static choices of local training; a method that condenses reads the task and the batch."""

    task: Task
    optimizer: str | None  # of OPTIMIZERS
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

    @property
    def epochs(self) -> int:
        """The local epochs of clients that train; those that condense have none."""
        assert self.local_epochs is not None
        return self.local_epochs


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
    return _optimizer(training, hp).init(variables["params"])


def _optimizer(training: LocalTraining, hp) -> optax.GradientTransformation:
    assert training.optimizer is not None, "clients that condense have none"
    optimizer = OPTIMIZERS[training.optimizer].make(hp)
    # Of a small network all that is kept is one row: a step, and what is done with clients' states,
    # are then a few operations, not a few for each layer (with Adam a program of 70 % the size,
    # compiled and run in 4/5 of the time; large networks, whose rows are copied, lose as much).
    # An optimiser that keeps nothing has nothing to gain.
    flat = training.optimizer != "sgd" and _is_small(training.task.model)
    return optax.flatten(optimizer) if flat else optimizer


@functools.lru_cache(maxsize=64)
def _is_small(model: Model) -> bool:
    return count_parameters(jax.eval_shape(model.init, jax.random.key(0))) <= SMALL


def kept_optimizer(training: LocalTraining, optimizer: Tree) -> Tree:
    """What of an optimiser's state a client keeps between rounds."""
    return optimizer if training.keep_state else ()


def descend(training: LocalTraining, hp, variables: Tree, gradient: Tree, optimizer: Tree):
    """One step of the local optimiser -> (variables, optimiser's state)."""
    step = _optimizer(training, hp).update
    updates, optimizer = step(gradient, optimizer, variables["params"])
    return {**variables, "params": optax.apply_updates(variables["params"], updates)}, optimizer


def training_step(training: LocalTraining, adjust: Callable = no_adjustment) -> Callable:
    """The step of a `ClientMethod` that moves `local.variables` along the adjusted gradient.

    `adjust(hp, gradient, local, broadcast, batch, client)` returns the gradient that the optimiser
    sees and the new `local.memory`.
    """

    def step(hp, broadcast, local, batch, client, key):
        loss, gradient, variables = training.task.loss_and_gradient(local.variables, batch, key)
        gradient, memory = adjust(hp, gradient, local, broadcast, batch, client)
        variables, optimizer = descend(training, hp, variables, gradient, local.optimizer)
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
