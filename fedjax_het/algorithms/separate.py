"""Clients with models of their own and no global one; Separate, which exchange nothing."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.core.client_loop import CohortResult, tile_over_clients, train_cohort
from fedjax_het.core.contract_checks import with_contract_checks
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    LocalTraining,
    begin_local_training,
    init_local_optimizer,
    make_training_step,
    select_kept_optimizer_state,
)
from fedjax_het.utils.config import Config

Tree = Any

Initialization = Literal["independent", "shared"]


@dataclass(frozen=True)
class SeparateOptions(Config):
    initialisation: Initialization = "shared"
    "Whether every client draws its first weights, or one draw serves all."


class PersonalModelState(NamedTuple):
    """What a client keeps: its model, its optimiser's state, if kept, and how often it trained."""

    variables: Tree
    optimizer: Tree
    num_rounds: jax.Array  # [] int32


def separate(
    training: LocalTraining, plan: ExecutionPlan, *, options: SeparateOptions = SeparateOptions()
) -> Algorithm:
    """Every client trains on its own data alone, `local_epochs` each round it takes part in.

    initialisation: "independent" draws every client's weights, "shared" is one draw for all. The
    update norm of a round is the root mean square over clients. Traffic: none. State: K models.
    """

    def begin(context, state):
        return begin_local_training(training, context.hp, state.variables, state.optimizer)

    client_algorithm = with_contract_checks(
        ClientAlgorithm(
            make_personal_model_init(training),
            begin,
            make_training_step(training),
            make_personal_model_end(training),
        )
    )

    def init(hp, key, variables, num_clients):
        init_args = (hp, key, variables, num_clients, options.initialisation)
        clients = init_personal_models(training, client_algorithm, *init_args)
        return State((), clients, jnp.int32(0))

    def round_(hp, state, key, cohort):
        result = train_cohort(client_algorithm, plan, hp, (), state.clients, key, cohort)
        info = RoundInfo(result.train_loss, compute_rms_change(result))
        return State((), result.states, state.round + 1), info

    return Algorithm(
        init=init,
        round=round_,
        global_model=None,
        with_global_model=None,
        traffic=lambda hp, state: Traffic(0, 0),
        personal_variables=get_client_model,
    )


def make_personal_model_init(training: LocalTraining):
    """`ClientAlgorithm.init` of clients that keep their models."""

    def init(hp, variables):
        optimizer = init_local_optimizer(training, hp, variables)
        return PersonalModelState(
            variables, select_kept_optimizer_state(training, optimizer), jnp.int32(0)
        )

    return init


def make_personal_model_end(training: LocalTraining):
    """`ClientAlgorithm.end` of clients that keep their models; summed is only how far they moved."""

    def end(context, local, state):
        params_pair = (local.variables["params"], state.variables["params"])
        squared_change = optax.tree.norm(jax.tree.map(jnp.subtract, *params_pair), squared=True)
        optimizer = select_kept_optimizer_state(training, local.optimizer_state)
        return (
            ClientUpdate(sum=squared_change),
            PersonalModelState(local.variables, optimizer, state.num_rounds + 1),
            (),
        )

    return end


def init_personal_models(
    training: LocalTraining,
    client_algorithm: ClientAlgorithm,
    hp,
    key: jax.Array,
    variables: Tree,
    num_clients: int,
    initialization: str,
) -> PersonalModelState:
    """All clients at the start, `[K, ...]`; with their own weights if "independent"."""
    if initialization == "shared":
        return tile_over_clients(client_algorithm.init(hp, variables), num_clients)
    keys = jax.vmap(lambda k: jax.random.fold_in(key, k))(jnp.arange(num_clients))
    return jax.vmap(
        lambda client_key: client_algorithm.init(hp, training.task.model.init(client_key))
    )(keys)


def get_client_model(hp, state: State, k) -> Tree:
    """`Algorithm.personal_variables` of clients that keep their models."""
    return get_client_row(state.clients.variables, k)


def compute_rms_change(result: CohortResult) -> jax.Array:
    """Root mean square over all clients of the L2 norm of their weights' change, by `make_personal_model_end`."""
    return jnp.sqrt(result.update.sum / len(result.states.num_rounds))


SPEC = AlgorithmSpec(
    "separate",
    separate,
    "every client trains alone",
    options=SeparateOptions,
    protocol="fedamp",
    color="#777777",
    evaluated_models=("client",),
    has_global_model=False,
)
