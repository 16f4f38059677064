"""pFedMe (Dinh, Tran and Nguyen, NeurIPS 2020, arXiv:2006.08848)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.building import federated
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.records import Count, Positive, Record
from fedjax_het.engine.contract import ClientMethod
from fedjax_het.engine.lanes import client_row
from fedjax_het.engine.local import LocalTraining, descend, local_sgd, pulled
from fedjax_het.engine.plan import Plan

Tree = Any


@dataclass(frozen=True)
class PFedMeOptions(Record):
    inner_steps: Count = 5
    "Of theta_k on each minibatch."


@dataclass(frozen=True)
class PFedMeNumbers(Record):
    pfedme_lambda: Positive = 15.0
    "How strongly personal and local models pull each other."
    personal_lr: Positive = 0.09
    "Of the personal model's steps."


class PFedMeClient(NamedTuple):
    """What a client keeps: its personal model theta_k and its optimiser's state, if kept."""

    personal: Tree
    optimizer: Tree


def pfedme(
    training: LocalTraining, plan: Plan, *, options: PFedMeOptions = PFedMeOptions()
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
    base = local_sgd(training)

    def init(hp, variables):
        return PFedMeClient(variables, base.init(hp, variables))

    def begin(hp, broadcast, state, client):
        local = base.begin(hp, broadcast, state.optimizer, client)
        return local._replace(memory=broadcast.variables)

    def step(hp, broadcast, local, batch, client, key):
        w, strength = local.variables["params"], hp["pfedme_lambda"]

        def approach(personal, i):
            inner_key = jax.random.fold_in(key, i)
            loss, gradient, seen = training.task.loss_and_gradient(personal, batch, inner_key)
            slope = pulled(gradient, personal["params"], w, strength)
            params = jax.tree.map(lambda p, g: p - hp["personal_lr"] * g, personal["params"], slope)
            return {**seen, "params": params}, loss

        personal, losses = jax.lax.scan(approach, local.memory, jnp.arange(options.inner_steps))
        gradient = jax.tree.map(lambda w, p: strength * (w - p), w, personal["params"])
        variables = {**personal, "params": w}
        variables, optimizer = descend(
            training, hp, variables, gradient, local.optimizer, (batch, client)
        )
        return local._replace(variables=variables, optimizer=optimizer, memory=personal), losses[0]

    def end(hp, broadcast, local, state, client):
        upload, optimizer, output = base.end(hp, broadcast, local, state.optimizer, client)
        return upload, PFedMeClient(local.memory, optimizer), output

    return federated(training, plan, ClientMethod(init, begin, step, end))._replace(
        personal=lambda hp, state, k: client_row(state.clients.personal, k), pageable=False
    )


ENTRY = Entry(
    "pfedme",
    pfedme,
    "clients' models are proximal points of the global one (Dinh et al., 2020)",
    paper="Dinh, Tran and Nguyen, NeurIPS 2020, arXiv:2006.08848",
    options=PFedMeOptions,
    numbers=PFedMeNumbers,
    protocol="fedamp",
    colour="#8C6D31",
    scored=("personal",),
)
