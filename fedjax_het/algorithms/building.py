"""The builder that most methods share: clients train, the server folds in what they send."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.contract import Algorithm, RoundInfo, State, Traffic
from fedjax_het.common.arrays import AnyArray
from fedjax_het.engine.contract import (
    Client,
    ClientMethod,
    ContractError,
    HyperParameters,
    Upload,
    call,
    checked_client,
    kind_of,
    require_like,
)
from fedjax_het.engine.lanes import Cohort, client_row, for_each_client, train_cohort
from fedjax_het.engine.local import Broadcast, LocalTraining
from fedjax_het.engine.plan import Plan

Tree = Any


class Counts(NamedTuple):
    """How many there are; scalars."""

    clients: AnyArray  # int32: K
    trained: AnyArray  # int32: of the round's, those that hold data
    share: AnyArray
    """float32: of the weight of all K clients in the run's `averaging`, that of the round's. With
    it the round's mean becomes its part of a mean over all: sum_i p_i x_i over the round's i is
    share * mean."""


class UpdateServer(Protocol):
    """-> the server's state after a round, of the same structure, shapes and types."""

    def __call__(self, hp: HyperParameters, server: Any, upload: Upload, counts: Counts) -> Any: ...


class InitServer(Protocol):
    """-> the server's state before the first round; like a `Broadcast`, it has `variables`."""

    def __call__(self, hp: HyperParameters, variables: Tree) -> Any: ...


class SendToClients(Protocol):
    """-> what the clients of a round read; it has `variables`."""

    def __call__(self, server: Any, cohort: Cohort) -> Any: ...


class Kept(NamedTuple):
    """A client's state where its model after local training is kept to be scored."""

    own: Tree
    variables: Tree


def federated(
    training: LocalTraining,
    plan: Plan,
    client: ClientMethod,
    *,
    init: Callable[[Tree, Tree], Tree] = lambda hp, variables: Broadcast(variables),
    update: UpdateServer | None = None,
    send: Callable[[Tree, Cohort], Broadcast] = lambda server, cohort: server,
) -> Algorithm:
    """A method whose clients train locally and whose server folds the sum of their uploads in.

    With `training.scored` "client" every client's model after local training is kept, and is what
    its own test is for (one more model per client); else that is the global model. With
    `training.hands_out_models` a round reports the models of its S clients after local training, on
    every device (up to twice S models of memory, for slots that no client fills).

    Args:
      init(hp, variables) -> server state, which is a `Broadcast`: what is sent is what is kept.
      update(hp, server, upload, counts) -> server state; default: add server_lr times the mean
        change (FedAvg).
      send(server, cohort) -> what clients read, if not only what the server keeps.
    """
    update_server = update or fedavg_update
    if not isinstance(client, ClientMethod):
        raise ContractError(f"client is {kind_of(client)}: expected a ClientMethod")
    client = checked_client(client)
    keeps = training.scored == "client"
    if keeps:
        client = _keeping(client)
    hands_out = training.hands_out_models
    if hands_out:
        client = _handing_out(client)

    def init_state(hp, key, variables, num_clients):
        client_state = client.init(hp, variables)
        server = call("init", init, InitServer, hp, variables)
        _require_broadcast("init", server)
        return State(server, for_each_client(client_state, num_clients), jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        sent = call("send", send, SendToClients, state.server, cohort)
        _require_broadcast("send", sent)
        result = train_cohort(client, plan, hp, sent, state.clients, key, cohort, gather=hands_out)
        schedule = cohort.schedule
        counts = Counts(schedule.num_clients, result.num_trained, schedule.share)
        given = (hp, state.server, result.upload, counts)
        server = call("update", update_server, UpdateServer, *given)
        _require_broadcast("update", server)
        change = jax.tree.map(
            jnp.subtract, server.variables["params"], state.server.variables["params"]
        )
        models = result.outputs if hands_out else None
        info = RoundInfo(result.train_loss, optax.tree.norm(change), models=models)
        return State(server, result.states, state.round + 1), info

    def traffic(hp, state):
        client_state = client_row(state.clients, 0)
        upload = jax.eval_shape(_upload_of(client), hp, state.server, client_state)
        return Traffic(num_bytes(state.server), num_bytes(upload))

    return Algorithm(
        init=init_state,
        round=round_,
        global_model=sent_model,
        with_global_model=with_sent_model,
        traffic=traffic,
        personal=(lambda hp, state, k: client_row(state.clients.variables, k)) if keeps else None,
        extra_passes=client.extra_passes,
        pageable=not keeps,
    )


def _require_broadcast(name: str, found: Any) -> None:
    """Raise ContractError for a server's state, or what it sends, without a model."""
    if "params" not in (getattr(found, "variables", None) or {}):
        expected = "a Broadcast, or what has its `variables`, the model"
        raise ContractError(f"{name} returned {kind_of(found)}: expected {expected}")


def _keeping(client: ClientMethod) -> ClientMethod:
    """The same, with the model after local training in the client's state."""

    def end(hp, broadcast, local, state, me):
        upload, own, output = client.end(hp, broadcast, local, state.own, me)
        return upload, Kept(own, local.variables), output

    return client._replace(
        init=lambda hp, variables: Kept(client.init(hp, variables), variables),
        begin=lambda hp, broadcast, state, me: client.begin(hp, broadcast, state.own, me),
        end=end,
    )


def _handing_out(client: ClientMethod) -> ClientMethod:
    """The same, whose output is the model after local training."""

    def end(hp, broadcast, local, state, me):
        upload, state, _ = client.end(hp, broadcast, local, state, me)
        return upload, state, local.variables

    return client._replace(end=end)


def sent_model(state: State) -> Tree:
    """The global model of a method whose server state is a `Broadcast`."""
    return state.server.variables


def with_sent_model(state: State, variables: Tree) -> State:
    return state._replace(server=state.server._replace(variables=variables))


def fedavg_update(hp, server: Broadcast, upload: Upload, counts: Counts) -> Broadcast:
    """FedAvg's server, whose upload is the mean change."""
    return add_mean_change(hp, server, upload.mean)


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


def model_both_ways(hp, state: State) -> Traffic:
    """Traffic of a method whose clients send one model, and receive one."""
    size = num_bytes(state.server.variables)
    return Traffic(size, size)


def _upload_of(client: ClientMethod):
    """-> upload(hp, server, state) of one client, to be evaluated abstractly."""

    def upload(hp, server, state):
        count = jnp.int32(1)
        me = Client(jnp.int32(0), count, count, jax.random.key(0), jnp.zeros(0))
        return client.end(hp, server, client.begin(hp, server, state, me), state, me)[0]

    return upload


def num_bytes(tree: Tree) -> int:
    """What the arrays of a tree take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
