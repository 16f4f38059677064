"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948)."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.building import federated
from fedjax_het.algorithms.contract import Algorithm, Tuning
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.records import NonNegative, Positive, Record
from fedjax_het.engine.local import Local, LocalTraining, descend, local_sgd, plain_sgd, whole_model
from fedjax_het.engine.plan import Plan


@dataclass(frozen=True)
class PerFedAvgOptions(Record):
    order: Literal["first", "hessian_free", "exact"] = "first"
    "What becomes of the Hessian; see `per_fedavg`."


@dataclass(frozen=True)
class PerFedAvgNumbers(Record):
    inner_lr: NonNegative = 0.01
    "Of the step on its own data that a client's loss looks past, and of that before it is scored."
    hf_delta: Positive | None = None
    "Length of the differences, where they are taken."


def per_fedavg(
    training: LocalTraining, plan: Plan, *, options: PerFedAvgOptions = PerFedAvgOptions()
) -> Algorithm:
    """Algorithm 1: FedAvg of the loss that a client has after one step on its own data. A local
    step takes two consecutive minibatches D, D' of the client's (they may be of two epochs):

        w' = w - inner_lr grad f(w; D),
        w <- w - local_lr (I - inner_lr H(w; D')) grad f(w'; D'),

    the second step being the local optimiser's. A last odd minibatch is both D and D': so it is for
    a client that has no more than one minibatch a round.

    order: what becomes of the Hessian H. "first" (FO) leaves it out, as most public code does by
      default; "hessian_free" (HF) takes H g as the difference of the gradients at w +- hf_delta g
      by 2 hf_delta; "exact" differentiates the gradient along g.
    The paper gives the Hessian a third minibatch; here it has D' too, so that all orders do the
    same number of steps on the same minibatches. Defaults: inner_lr 0.01 and hf_delta 1e-3, those
    of FL-bench (KarhouTam/FL-bench).

    Batch-norm statistics are of all minibatches that count. The loss reported is the mean over
    those at w and at w', of a last odd minibatch that at w. Scored: the global model after one
    plain step of inner_lr on one minibatch of the client's. Traffic: FedAvg's. State: none. Cost: a
    gradient a minibatch, two of a last odd one; for every second one two more with HF, or about as
    much with "exact". With lanes in one step all of that in every step.
    """
    base, order = local_sgd(training), options.order

    def begin(hp, broadcast, state, client):
        # The memory is where the next gradient is taken: w, then w'.
        return base.begin(hp, broadcast, state, client)._replace(memory=broadcast.variables)

    def step(hp, broadcast, local, batch, client, key):
        def slope_at(variables):
            return training.task.loss_and_gradient(variables, batch, key)

        def gradient_at(params):
            return slope_at({**local.variables, "params": params})[1]

        def look_ahead(local, gradient, seen):
            return local._replace(memory={**seen, "params": _along(w, gradient, -hp["inner_lr"])})

        def move(local, gradient, seen):
            meta = gradient
            if order != "first":
                delta = hp["hf_delta"] if order == "hessian_free" else None
                curved = _hessian_product(gradient_at, w, gradient, delta)
                meta = _along(gradient, curved, -hp["inner_lr"])
            variables = {**seen, "params": w}
            variables, optimizer = descend(
                training, hp, variables, meta, local.optimizer, (batch, client)
            )
            return Local(variables, optimizer, variables)

        def look_ahead_and_move(local, gradient, seen):
            ahead = look_ahead(local, gradient, seen)
            return move(ahead, *slope_at(ahead.memory)[1:])

        w = local.variables["params"]
        loss, gradient, seen = slope_at(local.memory)
        second = batch.number % 2
        without_partner = (second == 0) & (batch.number + 1 == client.num_steps)
        which = jnp.where(without_partner, 2, second)
        moves = (look_ahead, move, look_ahead_and_move)
        return jax.lax.switch(which, moves, local, gradient, seen), loss

    client = base._replace(begin=begin, step=step)
    return federated(training, plan, client)._replace(tuning=_one_step(training))


def _along(tree, direction, length):
    return jax.tree.map(lambda a, d: a + length * d, tree, direction)


def _hessian_product(gradient_at, params, vector, delta):
    """H(params) vector: exact, or by a central difference over `delta`."""
    if delta is None:
        return jax.jvp(gradient_at, (params,), (vector,))[1]
    ahead, behind = (gradient_at(_along(params, vector, sign * delta)) for sign in (1, -1))
    return jax.tree.map(lambda a, b: (a - b) / (2 * delta), ahead, behind)


def _one_step(training: LocalTraining) -> Tuning:
    """Plain SGD by inner_lr on one minibatch."""
    client = whole_model(plain_sgd(training))

    def step(hp, *rest):
        return client.step({**hp, "local_lr": hp["inner_lr"]}, *rest)

    return Tuning(client._replace(step=step), epochs=1, steps=1)


def per_fedavg_numbers(options: PerFedAvgOptions, num_clients: int) -> PerFedAvgNumbers:
    return PerFedAvgNumbers(hf_delta=1e-3 if options.order == "hessian_free" else None)


ENTRY = Entry(
    "per_fedavg",
    per_fedavg,
    "FedAvg of the loss after one step at each client (Fallah et al., 2020)",
    paper="Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948",
    options=PerFedAvgOptions,
    numbers=per_fedavg_numbers,
    protocol="fedamp",
    colour="#17BECF",
    scored=("tuned",),
)
