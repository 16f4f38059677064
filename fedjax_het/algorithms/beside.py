"""FedAvg whose clients train a model of their own beside their copy of the global one."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_het.algorithms.building import build_federated_algorithm
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.engine.contract import ClientAlgorithm
from fedjax_het.engine.lanes import get_client_row
from fedjax_het.engine.local import (
    ClientTrainState,
    LocalTraining,
    begin_local_training,
    init_local_optimizer,
    make_local_sgd,
    select_kept_optimizer_state,
)
from fedjax_het.engine.plan import ExecutionPlan

Tree = Any


class DualModelState(NamedTuple):
    """What a client keeps.

    own: its model, the state of that model's optimiser, if kept, and what the method remembers.
    optimizer: of its copy of the global model, if kept.
    """

    personal: ClientTrainState
    optimizer: Tree


def build_dual_model_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    step_personal_model: Callable,
    *,
    init_aux: Callable[[dict], Tree] = lambda hp: (),
) -> Algorithm:
    """FedAvg, whose clients also train a model of their own on the same minibatches.

    step_personal_model(hp, broadcast, local, moved, batch, client, key) -> (own, loss): a step of the client's
    own model `local.aux`, a `ClientTrainState` that starts at the run's first weights and is the client's
    from round to round. `local` and `moved` are its copy of the global model before and after the
    step on this minibatch. `memory(hp)` is the first `own.memory`.

    Scored: the client's own model, whose losses are reported. Traffic: FedAvg's. State: one model
    per client. Cost: two gradients a step.
    """
    base = make_local_sgd(training)

    def init(hp, variables):
        optimizer = select_kept_optimizer_state(
            training, init_local_optimizer(training, hp, variables)
        )
        return DualModelState(
            ClientTrainState(variables, optimizer, init_aux(hp)), base.init(hp, variables)
        )

    def begin(hp, message, state, client):
        local = base.begin(hp, message, state.optimizer, client)
        personal = begin_local_training(training, hp, *state.personal)
        return local._replace(aux=personal)

    def step(hp, message, local, batch, client, key):
        new_local, _ = base.step(hp, message, local, batch, client, key)
        personal, loss = step_personal_model(hp, message, local, new_local, batch, client, key)
        return new_local._replace(aux=personal), loss

    def end(hp, message, local, state, client):
        client_update, optimizer, output = base.end(hp, message, local, state.optimizer, client)
        personal = local.aux._replace(
            optimizer_state=select_kept_optimizer_state(training, local.aux.optimizer_state)
        )
        return client_update, DualModelState(personal, optimizer), output

    return build_federated_algorithm(
        training, plan, ClientAlgorithm(init, begin, step, end)
    )._replace(
        personal_variables=lambda hp, state, k: get_client_row(state.clients.personal.variables, k),
        can_page_state=False,
    )
