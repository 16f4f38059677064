"""pFedMe (Dinh, Tran and Nguyen, NeurIPS 2020, arXiv:2006.08848)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientAlgorithm
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    LocalTraining,
    add_proximal_gradient,
    apply_gradient,
    make_local_sgd,
)
from fedjax_het.utils.config import Config, PositiveFloat, PositiveInt

Tree = Any


@dataclass(frozen=True)
class PFedMeOptions(Config):
    inner_steps: PositiveInt = 5
    "Of theta_k on each minibatch."


@dataclass(frozen=True)
class PFedMeHyperParameters(Config):
    pfedme_lambda: PositiveFloat = 15.0
    "How strongly personal and local models pull each other."
    personal_lr: PositiveFloat = 0.09
    "Of the personal model's steps."


class PFedMeClientState(NamedTuple):
    """What a client keeps: its personal model theta_k and its optimiser's state, if kept."""

    personal: Tree
    optimizer: Tree


def pfedme(
    training: LocalTraining, plan: ExecutionPlan, *, options: PFedMeOptions = PFedMeOptions()
) -> Algorithm:
    """Algorithm 1: the clients minimise the Moreau envelopes of their losses. Every local step
    approaches the proximal point theta_k of w_k on one minibatch, and moves w_k towards it:

        theta_k <- theta_k - personal_lr (grad f(theta_k) + lambda (theta_k - w_k)), inner_steps
        times, then w_k <- w_k - local_lr lambda (w_k - theta_k),

    lambda (w_k - theta_k) being the envelope's gradient, which the local optimiser takes. The
    server does w <- (1 - beta) w + beta mean(w_k), beta = `server_lr`. In a round theta_k starts at
    the model received and goes on from step to step, as in the public code (CharlieDinh/pFedMe),
    whose defaults these are: `pfedme_lambda` 15, inner_steps 5, `personal_lr` 0.09, beta 1;
    local_lr is 0.005 and a round 20 minibatches there. Plain steps need personal_lr * lambda < 2.

    Differences from that code: it also decays theta_k by 0.001 in later versions, lets all clients
    train though it averages a sample of them, and copies w_k over theta_k before it scores that.
    Batch-norm statistics are theta_k's, also for w_k, with which no minibatch is run.

    Scored: theta_k of the client's last round. The loss reported is that of theta_k when it meets
    a minibatch. Traffic: FedAvg's. State: one model per client. Cost: inner_steps gradients a step.
    """
    base = make_local_sgd(training)

    def init(hp, variables):
        return PFedMeClientState(variables, base.init(hp, variables))

    def begin(context, state):
        local = base.begin(context, state.optimizer)
        return local._replace(aux=context.message.variables)

    def step(context, local, batch):
        w, proximal_weight = local.variables["params"], context.hp["pfedme_lambda"]

        def step_personal_model(personal, i):
            inner_key = jax.random.fold_in(context.key, i)
            loss, gradient, new_variables = training.task.loss_and_gradient(
                personal, batch, inner_key
            )
            proximal_gradient = add_proximal_gradient(
                gradient, personal["params"], w, proximal_weight
            )
            params = jax.tree.map(
                lambda p, g: p - context.hp["personal_lr"] * g,
                personal["params"],
                proximal_gradient,
            )
            return {**new_variables, "params": params}, loss

        personal, losses = jax.lax.scan(
            step_personal_model, local.aux, jnp.arange(options.inner_steps)
        )
        gradient = jax.tree.map(lambda w, p: proximal_weight * (w - p), w, personal["params"])
        variables = {**personal, "params": w}
        variables, optimizer = apply_gradient(
            training, context, variables, gradient, local.optimizer_state, batch
        )
        return local._replace(variables=variables, optimizer_state=optimizer, aux=personal), losses[
            0
        ]

    def end(context, local, state):
        client_update, optimizer, output = base.end(context, local, state.optimizer)
        return client_update, PFedMeClientState(local.aux, optimizer), output

    return build_federated_algorithm(
        training, plan, ClientAlgorithm(init, begin, step, end)
    )._replace(
        personal_variables=lambda hp, state, k: get_client_row(state.clients.personal, k),
        can_page_state=False,
    )


SPEC = AlgorithmSpec(
    "pfedme",
    pfedme,
    "clients' models are proximal points of the global one (Dinh et al., 2020)",
    paper="Dinh, Tran and Nguyen, NeurIPS 2020, arXiv:2006.08848",
    options=PFedMeOptions,
    hyperparameters=PFedMeHyperParameters,
    protocol="fedamp",
    color="#8C6D31",
    evaluated_models=("personal",),
)
