"""The builder that most methods share: clients train, the server folds in what they send."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.contract import Algorithm, RoundInfo, State, Traffic
from fedjax_het.common.arrays import AnyArray
from fedjax_het.engine.contract import (
    ClientAlgorithm,
    ClientInfo,
    ClientUpdate,
    ContractError,
    HyperParameters,
    call_user_function,
    describe_value,
    require_like,
    with_contract_checks,
)
from fedjax_het.engine.lanes import Cohort, get_client_row, tile_over_clients, train_cohort
from fedjax_het.engine.local import LocalTraining, ServerMessage
from fedjax_het.engine.plan import ExecutionPlan

Tree = Any


class CohortCounts(NamedTuple):
    """How many there are; scalars."""

    num_clients: AnyArray  # int32: K
    num_trained: AnyArray  # int32: of the round's, those that hold data
    cohort_weight_share: AnyArray
    """float32: of the weight of all K clients in the run's `averaging`, that of the round's. With
    it the round's mean becomes its part of a mean over all: sum_i p_i x_i over the round's i is
    share * mean."""


class UpdateServerFn(Protocol):
    """-> the server's state after a round, of the same structure, shapes and types."""

    def __call__(
        self, hp: HyperParameters, server: Any, client_update: ClientUpdate, counts: CohortCounts
    ) -> Any: ...


class InitServerFn(Protocol):
    """-> the server's state before the first round; like a `ServerMessage`, it has `variables`."""

    def __call__(self, hp: HyperParameters, variables: Tree) -> Any: ...


class MakeMessageFn(Protocol):
    """-> what the clients of a round read; it has `variables`."""

    def __call__(self, server: Any, cohort: Cohort) -> Any: ...


class EvaluatedClientState(NamedTuple):
    """A client's state where its model after local training is kept to be scored."""

    inner: Tree
    variables: Tree


def build_federated_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    client_algorithm: ClientAlgorithm,
    *,
    init_server: Callable[[Tree, Tree], Tree] = lambda hp, variables: ServerMessage(variables),
    update: UpdateServerFn | None = None,
    make_message: Callable[[Tree, Cohort], ServerMessage] = lambda server, cohort: server,
) -> Algorithm:
    """A method whose clients train locally and whose server folds the sum of their uploads in.

    With `training.scored` "client" every client's model after local training is kept, and is what
    its own test is for (one more model per client); else that is the global model. With
    `training.hands_out_models` a round reports the models of its S clients after local training, on
    every device (up to twice S models of memory, for slots that no client fills).

    Args:
      init(hp, variables) -> server state, which is a `ServerMessage`: what is sent is what is kept.
      update(hp, server, upload, counts) -> server state; default: add server_lr times the mean
        change (FedAvg).
      send(server, cohort) -> what clients read, if not only what the server keeps.
    """
    update_server = update or update_by_mean_change
    if not isinstance(client_algorithm, ClientAlgorithm):
        raise ContractError(
            f"client is {describe_value(client_algorithm)}: expected a ClientAlgorithm"
        )
    client_algorithm = with_contract_checks(client_algorithm)
    evaluates_client_model = training.evaluated_model == "client"
    if evaluates_client_model:
        client_algorithm = _store_trained_model(client_algorithm)
    returns_client_models = training.returns_client_models
    if returns_client_models:
        client_algorithm = _output_trained_model(client_algorithm)

    def init_state(hp, key, variables, num_clients):
        client_state = client_algorithm.init(hp, variables)
        server = call_user_function("init", init_server, InitServerFn, hp, variables)
        _require_message("init", server)
        return State(server, tile_over_clients(client_state, num_clients), jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        message = call_user_function("send", make_message, MakeMessageFn, state.server, cohort)
        _require_message("send", message)
        result = train_cohort(
            client_algorithm,
            plan,
            hp,
            message,
            state.clients,
            key,
            cohort,
            gather_models=returns_client_models,
        )
        schedule = cohort.schedule
        counts = CohortCounts(schedule.num_clients, result.num_trained, schedule.weight_fraction)
        update_args = (hp, state.server, result.update, counts)
        server = call_user_function("update", update_server, UpdateServerFn, *update_args)
        _require_message("update", server)
        change = jax.tree.map(
            jnp.subtract, server.variables["params"], state.server.variables["params"]
        )
        models = result.outputs if returns_client_models else None
        info = RoundInfo(result.train_loss, optax.tree.norm(change), models=models)
        return State(server, result.states, state.round + 1), info

    def traffic(hp, state):
        client_state = get_client_row(state.clients, 0)
        client_update = jax.eval_shape(
            _make_abstract_client_update(client_algorithm), hp, state.server, client_state
        )
        return Traffic(num_bytes(state.server), num_bytes(client_update))

    return Algorithm(
        init=init_state,
        round=round_,
        global_model=get_server_variables,
        with_global_model=with_server_variables,
        traffic=traffic,
        personal_variables=(lambda hp, state, k: get_client_row(state.clients.variables, k))
        if evaluates_client_model
        else None,
        extra_passes=client_algorithm.extra_passes,
        can_page_state=not evaluates_client_model,
    )


def _require_message(name: str, message: Any) -> None:
    """Raise ContractError for a server's state, or what it sends, without a model."""
    if "params" not in (getattr(message, "variables", None) or {}):
        expected = "a Broadcast, or what has its `variables`, the model"
        raise ContractError(f"{name} returned {describe_value(message)}: expected {expected}")


def _store_trained_model(client_algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """The same, with the model after local training in the client's state."""

    def end(hp, message, local, state, client):
        client_update, inner_state, output = client_algorithm.end(
            hp, message, local, state.inner, client
        )
        return client_update, EvaluatedClientState(inner_state, local.variables), output

    return client_algorithm._replace(
        init=lambda hp, variables: EvaluatedClientState(
            client_algorithm.init(hp, variables), variables
        ),
        begin=lambda hp, message, state, client: client_algorithm.begin(
            hp, message, state.inner, client
        ),
        end=end,
    )


def _output_trained_model(client_algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """The same, whose output is the model after local training."""

    def end(hp, message, local, state, client):
        client_update, state, _ = client_algorithm.end(hp, message, local, state, client)
        return client_update, state, local.variables

    return client_algorithm._replace(end=end)


def get_server_variables(state: State) -> Tree:
    """The global model of a method whose server state is a `ServerMessage`."""
    return state.server.variables


def with_server_variables(state: State, variables: Tree) -> State:
    return state._replace(server=state.server._replace(variables=variables))


def update_by_mean_change(
    hp, server: ServerMessage, client_update: ClientUpdate, counts: CohortCounts
) -> ServerMessage:
    """FedAvg's server, whose upload is the mean change."""
    return add_mean_change(hp, server, client_update.mean)


def add_mean_change(hp, server: Any, change: Tree) -> Any:
    """server + server_lr * the clients' mean change; batch-norm statistics with rate 1.

    Raises ContractError unless the change is of the same structure, shapes and types as the model.
    """
    require_like("update: the mean change", change, dict(server.variables), "the model has them")
    variables = {
        name: jax.tree.map(
            lambda s, u, rate=hp["server_lr"] if name == "params" else 1.0: s + rate * u,
            part,
            change[name],
        )
        for name, part in server.variables.items()
    }
    return server._replace(variables=variables)


def model_traffic(hp, state: State) -> Traffic:
    """Traffic of a method whose clients send one model, and receive one."""
    size = num_bytes(state.server.variables)
    return Traffic(size, size)


def _make_abstract_client_update(client_algorithm: ClientAlgorithm):
    """-> upload(hp, server, state) of one client, to be evaluated abstractly."""

    def make_client_update(hp, server, state):
        count = jnp.int32(1)
        client = ClientInfo(jnp.int32(0), count, count, jax.random.key(0), jnp.zeros(0))
        return client_algorithm.end(
            hp, server, client_algorithm.begin(hp, server, state, client), state, client
        )[0]

    return make_client_update


def num_bytes(tree: Tree) -> int:
    """What the arrays of a tree take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
