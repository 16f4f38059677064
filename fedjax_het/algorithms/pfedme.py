"""pFedMe (Dinh, Tran and Nguyen, NeurIPS 2020, arXiv:2006.08848)."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.client_state import with_client_memory
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    apply_gradient,
    make_local_sgd,
)
from fedjax_het.core.training_variants import add_proximal_gradient
from fedjax_het.utils.config import Config, PositiveFloat, PositiveInt, SearchRange


@dataclass(frozen=True)
class PFedMeOptions(Config):
    """Choices of pFedMe."""

    inner_steps: PositiveInt = 5
    "Steps of the personal model on each minibatch."


@dataclass(frozen=True)
class PFedMeHyperParameters(Config):
    """Hyperparameters of pFedMe."""

    pfedme_lambda: Annotated[PositiveFloat, SearchRange(1, 100)] = 15.0
    "Weight of the pull between personal and local models."
    personal_lr: Annotated[PositiveFloat, SearchRange(0.01, 1)] = 0.09
    "Learning rate of the personal model."


def pfedme(training: LocalTraining, plan: ExecutionPlan, *, options: PFedMeOptions) -> Algorithm:
    """pFedMe: clients minimize the Moreau envelopes of their losses (Algorithm 1).

    Every local step approaches the proximal point theta_k of w_k on one minibatch, `inner_steps`
    times, and then moves w_k towards it:

        theta_k <- theta_k - personal_lr (grad f(theta_k) + lambda (theta_k - w_k)),
        w_k     <- w_k - local_lr lambda (w_k - theta_k),
        w       <- (1 - beta) w + beta mean(w_k),   beta = server_lr.

    lambda (w_k - theta_k) is the envelope's gradient, which the local optimizer takes. In a round
    theta_k starts at the received model and goes on from step to step, as in the public code
    (CharlieDinh/pFedMe). Its defaults hold here: `pfedme_lambda` 15, inner_steps 5, `personal_lr`
    0.09, beta 1; its local_lr is 0.005, and a round has 20 minibatches. Plain steps need
    personal_lr * lambda < 2. Batch-norm statistics are theta_k's, also for w_k, which is never
    evaluated on a minibatch.

    Evaluated: theta_k of the client's last round. The reported loss is the loss of theta_k on each
    minibatch before the minibatch's steps. Traffic: one model down, one up. State: one model per
    client. Cost: `inner_steps` gradients per minibatch.

    The method follows Algorithm 1. The public code departs from it in three points. Later versions
    decay theta_k by 0.001. All clients train though a sample is averaged. w_k is copied over
    theta_k before the evaluation.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.
    """
    base = make_local_sgd(training)

    def step(context, local, batch):
        hp, w = context.hp, local.variables["params"]
        strength = hp["pfedme_lambda"]

        def step_personal_model(personal, i):
            theta, key = personal["params"], jax.random.fold_in(context.key, i)
            loss, gradient, variables = training.task.loss_and_gradient(personal, batch, key)
            gradient = add_proximal_gradient(gradient, theta, w, strength)
            params = jax.tree.map(lambda p, g: p - hp["personal_lr"] * g, theta, gradient)
            return {**variables, "params": params}, loss

        inner_steps = jnp.arange(options.inner_steps)
        personal, losses = jax.lax.scan(step_personal_model, local.aux, inner_steps)
        gradient = jax.tree.map(lambda w, p: strength * (w - p), w, personal["params"])
        variables, optimizer = {**personal, "params": w}, local.optimizer_state
        updated = apply_gradient(training, context, variables, gradient, optimizer, batch)
        return ClientTrainState(*updated, personal), losses[0]

    client = with_client_memory(
        base._replace(step=step),
        init=lambda hp, variables: variables,
        begin=lambda context, personal: context.message.variables,
        end=lambda context, local, personal, update: (update, local.aux),
    )
    return build_federated_algorithm(training, plan, client)._replace(
        personal_variables=lambda hp, state, k: get_client_row(state.clients.memory, k),
    )


SPEC = AlgorithmSpec(
    "pfedme",
    pfedme,
    "clients' models are proximal points of the global model (Dinh et al., 2020)",
    title="pFedMe",
    paper="Dinh, Tran and Nguyen, NeurIPS 2020, arXiv:2006.08848",
    options=PFedMeOptions,
    hyperparameters=PFedMeHyperParameters,
    color="#8C6D31",
    evaluated_models=("personal",),
)
