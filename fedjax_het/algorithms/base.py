"""The contract of a federated method: a record of pure functions, and the builder most share.

An algorithm never prints, touches a disk, calls `jit`, or loops over clients. Static choices are
closed over; numeric hyper-parameters come in the traced dict `hp`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.engine.lanes import Client, ClientMethod, Cohort, train_cohort
from fedjax_het.engine.local import Broadcast
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.units import PairWork

Tree = Any


class State(NamedTuple):
    """Everything that a federation carries from round to round."""

    server: Tree
    clients: Tree  # leading axis K; () for stateless methods
    round: jax.Array  # [] int32, rounds done


class RoundInfo(NamedTuple):
    """What every method reports of a round; scalars."""

    train_loss: jax.Array  # mean over samples, met in local training (nats) or in condensing
    update_norm: jax.Array  # L2 norm of the global model's change


class Traffic(NamedTuple):
    """Bytes per participating client and round."""

    down: int
    up: int
    up_per_pair: int = 0  # besides, for every class that it condenses


class Algorithm(NamedTuple):
    """A federated method.

    init(hp, key, variables, num_clients) -> State
    round(hp, state, key, cohort) -> (State, RoundInfo)
    global_model(state) -> variables             what is broadcast and evaluated
    with_global_model(state, variables) -> State
    traffic(hp, state) -> Traffic
    extra_passes: passes over a client's data before its local epochs
    pairs: how clients condense their data, where they do so instead of training
    host_work: work between rounds, outside the rounds' program (DynaFed's synthesis)
    artifacts(state), summary(hp, state): what the method leaves besides curves, as named arrays and
      as a JSON-able record
    """

    init: Callable
    round: Callable
    global_model: Callable
    with_global_model: Callable
    traffic: Callable
    extra_passes: int = 0
    pairs: PairWork | None = None
    host_work: "tuple[HostWork, ...]" = ()
    artifacts: Callable[[State], dict] = lambda state: {}
    summary: Callable[[Any, State], dict] = lambda hp, state: {}


class HostWork(NamedTuple):
    """Long server work between two rounds, done piece by piece so that it shows and resumes.

    done(state) -> int: iterations finished, of `total`.
    advance(hp, state, key, count) -> state after `count` (traced) more iterations.
    """

    name: str
    before_round: int
    total: int
    done: Callable[[State], int]
    advance: Callable


def federated(
    plan: Plan,
    client: ClientMethod,
    *,
    init: Callable[[Tree, Tree], Tree] = lambda hp, variables: Broadcast(variables),
    update: Callable[[Tree, Tree, Tree, Tree], Tree] | None = None,
) -> Algorithm:
    """A method whose clients train locally and whose server folds the sum of their uploads in.

    Args:
      init(hp, variables) -> server state, which is a `Broadcast`: what is sent is what is kept.
      update(hp, server, upload, states) -> server state; default: add
        server_lr times the weighted mean change (FedAvg).
    """
    update = update or add_mean_change

    def init_state(hp, key, variables, num_clients):
        one = client.init(hp, variables)
        clients = jax.tree.map(lambda a: jnp.broadcast_to(a, (num_clients, *a.shape)), one)
        return State(init(hp, variables), clients, jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        result = train_cohort(client, plan, hp, state.server, state.clients, key, cohort)
        server = update(hp, state.server, result.upload, result.states)
        change = jax.tree.map(
            jnp.subtract, server.variables["params"], state.server.variables["params"]
        )
        info = RoundInfo(result.train_loss, optax.tree.norm(change))
        return State(server, result.states, state.round + 1), info

    def traffic(hp, state):
        one = jax.tree.map(lambda a: a[0], state.clients)
        upload = jax.eval_shape(_upload(client), hp, state.server, one)
        return Traffic(num_bytes(state.server), num_bytes(upload))

    return Algorithm(
        init=init_state,
        round=round_,
        global_model=sent_model,
        with_global_model=with_sent_model,
        traffic=traffic,
        extra_passes=client.extra_passes,
    )


def sent_model(state: State) -> Tree:
    """The global model of a method whose server state is a `Broadcast`."""
    return state.server.variables


def with_sent_model(state: State, variables: Tree) -> State:
    return state._replace(server=state.server._replace(variables=variables))


def add_mean_change(hp, server: Broadcast, upload, states) -> Broadcast:
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


def num_bytes(tree) -> int:
    """What the arrays of a tree take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
