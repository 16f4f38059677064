"""Local SGD: the client triple that most methods share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from fedjax_het.engine.lanes import ClientMethod
from fedjax_het.engine.task import Task

Tree = Any

OPTIMIZERS: dict[str, Callable[[dict], optax.GradientTransformation]] = {
    "sgd": lambda hp: optax.sgd(hp["local_lr"]),
    "momentum": lambda hp: optax.sgd(hp["local_lr"], momentum=hp["local_momentum"]),
    "adam": lambda hp: optax.adam(hp["local_lr"]),
    "adamw": lambda hp: optax.adamw(hp["local_lr"], weight_decay=hp["local_weight_decay"]),
}


def optimizer_defaults(name: str) -> dict[str, float]:
    """The numeric hyper-parameters that a local optimiser reads."""
    extra = {"momentum": {"local_momentum": 0.9}, "adamw": {"local_weight_decay": 1e-4}}
    rate = 1e-3 if name.startswith("adam") else 0.01
    return {"local_lr": rate, **extra.get(name, {})}


class LocalTraining(NamedTuple):
    """Static choices of local training; a method that condenses reads the task and the batch."""

    task: Task
    optimizer: str | None  # of OPTIMIZERS
    local_epochs: int = 1
    keep_state: bool = False
    """Keep every client's optimiser state across rounds (as DynaFed's code does, where each
    client owns one Adam whose moments survive the weights' being overwritten) or reset it."""
    batch_size: int = 32


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


def local_sgd(training: LocalTraining, *, adjust: Callable = no_adjustment) -> ClientMethod:
    """Plain local training: step along the gradient, send back the change of the variables.

    Methods differ in `adjust(hp, gradient, local, broadcast, batch, client)`, which returns the
    gradient that the optimiser sees and the new `local.memory`.

    Upload: client.weight * (client - server), over all variables, so that batch-norm statistics
    are averaged like weights. State: the optimiser's, if it is kept.
    """
    task, make_optimizer = training.task, OPTIMIZERS[training.optimizer]

    def init(hp, variables):
        return make_optimizer(hp).init(variables["params"]) if training.keep_state else ()

    def begin(hp, broadcast, state, client):
        params = broadcast.variables["params"]
        optimizer = state if training.keep_state else make_optimizer(hp).init(params)
        return Local(broadcast.variables, optimizer, ())

    def step(hp, broadcast, local, batch, client, key):
        loss, gradient, variables = task.loss_and_gradient(local.variables, batch, key)
        gradient, memory_ = adjust(hp, gradient, local, broadcast, batch, client)
        updates, optimizer = make_optimizer(hp).update(
            gradient, local.optimizer, variables["params"]
        )
        params = optax.apply_updates(variables["params"], updates)
        return Local({**variables, "params": params}, optimizer, memory_), loss

    def end(hp, broadcast, local, state, client):
        upload = jax.tree.map(
            lambda new, old: client.weight * (new - old), local.variables, broadcast.variables
        )
        return upload, (local.optimizer if training.keep_state else ()), ()

    return ClientMethod(init, begin, step, end)
