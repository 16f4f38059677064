"""FedAvg whose clients train a model of their own beside their copy of the global one."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_het.algorithms.building import federated
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.engine.contract import ClientMethod
from fedjax_het.engine.lanes import client_row
from fedjax_het.engine.local import (
    Local,
    LocalTraining,
    begin_training,
    kept_optimizer,
    local_sgd,
    new_optimizer,
)
from fedjax_het.engine.plan import Plan

Tree = Any


class Beside(NamedTuple):
    """What a client keeps.

    own: its model, the state of that model's optimiser, if kept, and what the method remembers.
    optimizer: of its copy of the global model, if kept.
    """

    own: Local
    optimizer: Tree


def federated_beside(
    training: LocalTraining,
    plan: Plan,
    step_own: Callable,
    *,
    memory: Callable[[dict], Tree] = lambda hp: (),
) -> Algorithm:
    """FedAvg, whose clients also train a model of their own on the same minibatches.

    step_own(hp, broadcast, local, moved, batch, client, key) -> (own, loss): a step of the client's
    own model `local.memory`, a `Local` that starts at the run's first weights and is the client's
    from round to round. `local` and `moved` are its copy of the global model before and after the
    step on this minibatch. `memory(hp)` is the first `own.memory`.

    Scored: the client's own model, whose losses are reported. Traffic: FedAvg's. State: one model
    per client. Cost: two gradients a step.
    """
    base = local_sgd(training)

    def init(hp, variables):
        optimizer = kept_optimizer(training, new_optimizer(training, hp, variables))
        return Beside(Local(variables, optimizer, memory(hp)), base.init(hp, variables))

    def begin(hp, broadcast, state, client):
        local = base.begin(hp, broadcast, state.optimizer, client)
        own = begin_training(training, hp, *state.own)
        return local._replace(memory=own)

    def step(hp, broadcast, local, batch, client, key):
        moved, _ = base.step(hp, broadcast, local, batch, client, key)
        own, loss = step_own(hp, broadcast, local, moved, batch, client, key)
        return moved._replace(memory=own), loss

    def end(hp, broadcast, local, state, client):
        upload, optimizer, output = base.end(hp, broadcast, local, state.optimizer, client)
        own = local.memory._replace(optimizer=kept_optimizer(training, local.memory.optimizer))
        return upload, Beside(own, optimizer), output

    return federated(training, plan, ClientMethod(init, begin, step, end))._replace(
        personal=lambda hp, state, k: client_row(state.clients.own.variables, k), pageable=False
    )
