"""Separate: clients train alone and exchange nothing."""

from dataclasses import dataclass

import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.client_state import (
    Initialization,
    compute_rms_change,
    get_client_model,
    init_personal_models,
    make_personal_client,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_loop import train_cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    LocalTraining,
    begin_local_training,
    make_training_step,
)
from fedjax_het.utils.config import Config


@dataclass(frozen=True)
class SeparateOptions(Config):
    """Choices of Separate."""

    initialisation: Initialization = "shared"
    '"independent": every client draws its first weights; "shared": one draw for all clients.'


def separate(
    training: LocalTraining, plan: ExecutionPlan, *, options: SeparateOptions
) -> Algorithm:
    """Separate: every client trains on its own data alone.

        w_k <- LocalSGD(w_k)  for `local_epochs` in each round that client k takes part in.

    The reported update norm of a round is the root mean square over clients. Traffic: none. State:
    one model per client. Cost: one gradient per minibatch.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method, which has no global model.
    """

    def begin(context, state):
        return begin_local_training(training, context.hp, state.variables, state.optimizer)

    client = make_personal_client(training, begin, make_training_step(training))

    def init(hp, key, variables, num_clients):
        args = (hp, key, variables, num_clients, options.initialisation)
        return State((), init_personal_models(training, client, *args), jnp.int32(0))

    def round_(hp, state, key, cohort):
        result = train_cohort(client, plan, hp, (), state.clients, key, cohort)
        norm, losses = compute_rms_change(result), result.client_losses
        info = RoundInfo(result.train_loss, norm, client_losses=losses)
        return State((), result.states, state.round + 1), info

    return Algorithm(
        init=init,
        round=round_,
        global_model=None,
        with_global_model=None,
        traffic=lambda hp, state: Traffic(0, 0),
        personal_variables=get_client_model,
    )


SPEC = AlgorithmSpec(
    "separate",
    separate,
    "every client trains alone",
    title="Separate",
    options=SeparateOptions,
    color="#777777",
    evaluated_models=("client",),
    has_global_model=False,
)
