"""The contract of a federated method: a record of pure functions, and the builder most share.

An algorithm never prints, touches a disk, calls `jit`, or loops over clients. Static choices are
closed over; numeric hyper-parameters come in the traced dict `hp`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.data import MeanBlocks
from fedjax_het.engine.lanes import (
    Client,
    ClientMethod,
    ClientModels,
    Cohort,
    client_row,
    for_each_client,
    train_cohort,
)
from fedjax_het.engine.local import Broadcast, LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.units import PairWork
from fedjax_het.nn import Model

Tree = Any


class State(NamedTuple):
    """Everything that a federation carries from round to round."""

    server: Tree
    clients: Tree  # leading axis K, or of a table, see `Algorithm.pageable`; () if stateless
    round: jax.Array  # [] int32, rounds done


class RoundInfo(NamedTuple):
    """What every method reports of a round; scalars."""

    train_loss: jax.Array  # mean over samples, met in local training (nats) or in condensing
    update_norm: jax.Array  # L2 norm of the global model's change; of clients' own, see the method
    records: dict[str, jax.Array] = {}  # noqa: RUF012  what else: see `Algorithm.records`
    models: ClientModels | None = None  # where `LocalTraining.hands_out_models` asks for them


class Traffic(NamedTuple):
    """Bytes per participating client and round."""

    down: int
    up: int
    up_per_pair: int = 0  # besides, for every class that it condenses


class Algorithm(NamedTuple):
    """A federated method.

    init(hp, key, variables, num_clients) -> State
    round(hp, state, key, cohort) -> (State, RoundInfo)
    global_model(state) -> variables             what is broadcast and evaluated; None without one
    with_global_model(state, variables) -> State
    traffic(hp, state) -> Traffic
    personal(hp, state, k) -> variables          of the model that client k's own test is for;
                                                 default: the global one
    personal_model: the network of these variables (default: the run's own)
    tuning: how every client tunes a copy of the global model that is scored in its place
    records(num_clients) -> {name: shape}        of what `RoundInfo.records` holds
    extra_passes: passes over a client's data before its local epochs
    shares_server_data: whether clients train on the server's examples besides their own
    pageable: whether a round reads the states of its own clients alone, by row, so that the others'
      can be elsewhere; `init` then makes as many equal ones as it is asked for, which do not depend
      on the first model's weights, since those may be pretrained
    pairs: how clients condense their data, where they do so instead of training
    averaging: of which of their examples clients share averages, before the first round
    host_work: work between rounds, outside the rounds' program (DynaFed's synthesis)
    artifacts(state), summary(hp, state): what the method leaves besides curves, as named arrays and
      as a JSON-able record
    """

    init: Callable
    round: Callable
    global_model: Callable | None
    with_global_model: Callable | None
    traffic: Callable
    personal: Callable | None = None
    personal_model: Model | None = None
    tuning: "Tuning | None" = None
    records: Callable[[int], dict[str, tuple[int, ...]]] = lambda num_clients: {}
    extra_passes: int = 0
    shares_server_data: bool = False
    pageable: bool = False
    pairs: PairWork | None = None
    averaging: MeanBlocks | None = None
    host_work: "tuple[HostWork, ...]" = ()
    artifacts: Callable[[State], dict] = lambda state: {}
    summary: Callable[[Any, State], dict] = lambda hp, state: {}


class Tuning(NamedTuple):
    """Training of a copy of the global model by every client, before it is scored.

    The copies are scored and discarded: the federation goes on as if they had not been.
    client: a `ClientMethod` whose state is the model, as `whole_model` makes it.
    epochs: over the client's data; steps: at most so many minibatches of them (None: all).
    Cost: every evaluation trains all clients, and holds a model of each.
    """

    client: ClientMethod
    epochs: int
    steps: int | None = None


class HostWork(NamedTuple):
    """Long server work between two rounds, done piece by piece so that it shows and resumes.

    done(state) -> int: iterations finished, of `total`.
    advance(hp, state, key, count, server) -> state after `count` (traced) more iterations;
      `server` are the server's examples, a `ServerTraining` (None if it has none).
    """

    name: str
    before_round: int
    total: int
    done: Callable[[State], int]
    advance: Callable


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
    update: Callable[[Tree, Tree, Tree, jax.Array], Tree] | None = None,
    send: Callable[[Tree, Cohort], Broadcast] = lambda server, cohort: server,
) -> Algorithm:
    """A method whose clients train locally and whose server folds the sum of their uploads in.

    With `training.scored` "client" every client's model after local training is kept, and is what
    its own test is for (one more model per client); else that is the global model. With
    `training.hands_out_models` a round reports the models of its S clients after local training, on
    every device (up to twice S models of memory, for slots that no client fills).

    Args:
      init(hp, variables) -> server state, which is a `Broadcast`: what is sent is what is kept.
      update(hp, server, upload, num_clients) -> server state, where num_clients is K, an int32
        scalar; default: add server_lr times the weighted mean change (FedAvg).
      send(server, cohort) -> what clients read, if not only what the server keeps.
    """
    update = update or add_mean_change
    keeps = training.scored == "client"
    if keeps:
        client = _keeping(client)
    hands_out = training.hands_out_models
    if hands_out:
        client = _handing_out(client)

    def init_state(hp, key, variables, num_clients):
        one = client.init(hp, variables)
        return State(init(hp, variables), for_each_client(one, num_clients), jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        sent = send(state.server, cohort)
        result = train_cohort(client, plan, hp, sent, state.clients, key, cohort, gather=hands_out)
        num_clients = cohort.schedule.num_clients
        server = update(hp, state.server, result.upload, num_clients)
        change = jax.tree.map(
            jnp.subtract, server.variables["params"], state.server.variables["params"]
        )
        models = result.outputs if hands_out else None
        info = RoundInfo(result.train_loss, optax.tree.norm(change), models=models)
        return State(server, result.states, state.round + 1), info

    def traffic(hp, state):
        one = client_row(state.clients, 0)
        upload = jax.eval_shape(_upload(client), hp, state.server, one)
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


def add_mean_change(hp, server: Broadcast, upload, num_clients) -> Broadcast:
    """server + server_lr * sum of weighted changes; batch-norm statistics with rate 1."""
    variables = {
        name: jax.tree.map(
            lambda s, u, rate=hp["server_lr"] if name == "params" else 1.0: s + rate * u,
            part,
            upload[name],
        )
        for name, part in server.variables.items()
    }
    return server._replace(variables=variables)


def _upload(client: ClientMethod):
    def upload(hp, server, state):
        one = jnp.int32(1)
        me = Client(jnp.int32(0), jnp.float32(1), one, one, jax.random.key(0), jnp.zeros(0))
        return client.end(hp, server, client.begin(hp, server, state, me), state, me)[0]

    return upload


def written_out(options: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """Options with what a preset has chosen in place of every None."""
    return {name: chosen.get(name) if value is None else value for name, value in options.items()}


def num_bytes(tree) -> int:
    """What the arrays of a tree take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
