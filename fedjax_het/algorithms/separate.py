"""Clients with models of their own and no global one; Separate, which exchange nothing."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.contract import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.records import Record
from fedjax_het.engine.contract import ClientMethod, Upload, checked_client
from fedjax_het.engine.lanes import CohortResult, client_row, for_each_client, train_cohort
from fedjax_het.engine.local import (
    LocalTraining,
    begin_training,
    kept_optimizer,
    new_optimizer,
    training_step,
)
from fedjax_het.engine.plan import Plan

Tree = Any

Initialisation = Literal["independent", "shared"]


@dataclass(frozen=True)
class SeparateOptions(Record):
    initialisation: Initialisation = "shared"
    "Whether every client draws its first weights, or one draw serves all."


class OwnModel(NamedTuple):
    """What a client keeps: its model, its optimiser's state, if kept, and how often it trained."""

    variables: Tree
    optimizer: Tree
    rounds: jax.Array  # [] int32


def separate(
    training: LocalTraining, plan: Plan, *, options: SeparateOptions = SeparateOptions()
) -> Algorithm:
    """Every client trains on its own data alone, `local_epochs` each round it takes part in.

    initialisation: "independent" draws every client's weights, "shared" is one draw for all. The
    update norm of a round is the root mean square over clients. Traffic: none. State: K models.
    """

    def begin(hp, broadcast, state, client):
        return begin_training(training, hp, state.variables, state.optimizer)

    client = checked_client(
        ClientMethod(own_model(training), begin, training_step(training), keep_own(training))
    )

    def init(hp, key, variables, num_clients):
        given = (hp, key, variables, num_clients, options.initialisation)
        clients = own_models(training, client, *given)
        return State((), clients, jnp.int32(0))

    def round_(hp, state, key, cohort):
        result = train_cohort(client, plan, hp, (), state.clients, key, cohort)
        info = RoundInfo(result.train_loss, rms_change(result))
        return State((), result.states, state.round + 1), info

    return Algorithm(
        init=init,
        round=round_,
        global_model=None,
        with_global_model=None,
        traffic=lambda hp, state: Traffic(0, 0),
        personal=clients_own,
    )


def own_model(training: LocalTraining):
    """`ClientMethod.init` of clients that keep their models."""

    def init(hp, variables):
        optimizer = new_optimizer(training, hp, variables)
        return OwnModel(variables, kept_optimizer(training, optimizer), jnp.int32(0))

    return init


def keep_own(training: LocalTraining):
    """`ClientMethod.end` of clients that keep their models; summed is only how far they moved."""

    def end(hp, broadcast, local, state, client):
        models = (local.variables["params"], state.variables["params"])
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, *models), squared=True)
        optimizer = kept_optimizer(training, local.optimizer)
        return Upload(sum=moved), OwnModel(local.variables, optimizer, state.rounds + 1), ()

    return end


def own_models(
    training: LocalTraining,
    client: ClientMethod,
    hp,
    key: jax.Array,
    variables: Tree,
    num_clients: int,
    initialisation: str,
) -> OwnModel:
    """All clients at the start, `[K, ...]`; with their own weights if "independent"."""
    if initialisation == "shared":
        return for_each_client(client.init(hp, variables), num_clients)
    keys = jax.vmap(lambda k: jax.random.fold_in(key, k))(jnp.arange(num_clients))
    return jax.vmap(lambda own_key: client.init(hp, training.task.model.init(own_key)))(keys)


def clients_own(hp, state: State, k) -> Tree:
    """`Algorithm.personal` of clients that keep their models."""
    return client_row(state.clients.variables, k)


def rms_change(result: CohortResult) -> jax.Array:
    """Root mean square over all clients of the L2 norm of their weights' change, by `keep_own`."""
    return jnp.sqrt(result.upload.sum / len(result.states.rounds))


ENTRY = Entry(
    "separate",
    separate,
    "every client trains alone",
    options=SeparateOptions,
    protocol="fedamp",
    colour="#777777",
    scored=("client",),
    global_model=False,
)
