"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948)."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, FineTuning
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    apply_gradient,
    make_local_model_training,
    make_local_sgd,
    with_plain_sgd,
)
from fedjax_het.utils.config import Config, NonNegativeFloat, PositiveFloat


@dataclass(frozen=True)
class PerFedAvgOptions(Config):
    order: Literal["first", "hessian_free", "exact"] = "first"
    "What becomes of the Hessian; see `per_fedavg`."


@dataclass(frozen=True)
class PerFedAvgHyperParameters(Config):
    inner_lr: NonNegativeFloat = 0.01
    "Of the step on its own data that a client's loss looks past, and of that before it is scored."
    hf_delta: PositiveFloat | None = None
    "Length of the differences, where they are taken."


def per_fedavg(
    training: LocalTraining, plan: ExecutionPlan, *, options: PerFedAvgOptions = PerFedAvgOptions()
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
    base, order = make_local_sgd(training), options.order

    def begin(context, state):
        # The memory is where the next gradient is taken: w, then w'.
        return base.begin(context, state)._replace(aux=context.message.variables)

    def step(context, local, batch):
        def loss_and_gradient_at(variables):
            return training.task.loss_and_gradient(variables, batch, context.key)

        def gradient_at(params):
            return loss_and_gradient_at({**local.variables, "params": params})[1]

        def look_ahead(local, gradient, new_variables):
            return local._replace(
                aux={**new_variables, "params": _add_scaled(w, gradient, -context.hp["inner_lr"])}
            )

        def apply_meta_gradient(local, gradient, new_variables):
            meta_gradient = gradient
            if order != "first":
                delta = context.hp["hf_delta"] if order == "hessian_free" else None
                hessian_product = _hessian_product(gradient_at, w, gradient, delta)
                meta_gradient = _add_scaled(gradient, hessian_product, -context.hp["inner_lr"])
            variables = {**new_variables, "params": w}
            variables, optimizer = apply_gradient(
                training, context, variables, meta_gradient, local.optimizer_state, batch
            )
            return ClientTrainState(variables, optimizer, variables)

        def look_ahead_and_apply(local, gradient, new_variables):
            inner_step_state = look_ahead(local, gradient, new_variables)
            return apply_meta_gradient(
                inner_step_state, *loss_and_gradient_at(inner_step_state.aux)[1:]
            )

        w = local.variables["params"]
        loss, gradient, new_variables = loss_and_gradient_at(local.aux)
        is_second_batch = batch.step_index % 2
        is_unpaired = (is_second_batch == 0) & (batch.step_index + 1 == context.client.num_steps)
        branch_index = jnp.where(is_unpaired, 2, is_second_batch)
        branches = (look_ahead, apply_meta_gradient, look_ahead_and_apply)
        return jax.lax.switch(branch_index, branches, local, gradient, new_variables), loss

    client_algorithm = base._replace(begin=begin, step=step)
    return build_federated_algorithm(training, plan, client_algorithm)._replace(
        fine_tuning=_make_one_step_fine_tuning(training)
    )


def _add_scaled(tree, direction, scale):
    return jax.tree.map(lambda a, d: a + scale * d, tree, direction)


def _hessian_product(gradient_at, params, vector, delta):
    """H(params) vector: exact, or by a central difference over `delta`."""
    if delta is None:
        return jax.jvp(gradient_at, (params,), (vector,))[1]
    forward_gradient, backward_gradient = (
        gradient_at(_add_scaled(params, vector, sign * delta)) for sign in (1, -1)
    )
    return jax.tree.map(lambda a, b: (a - b) / (2 * delta), forward_gradient, backward_gradient)


def _make_one_step_fine_tuning(training: LocalTraining) -> FineTuning:
    """Plain SGD by inner_lr on one minibatch."""
    client_algorithm = make_local_model_training(with_plain_sgd(training))

    def step(context, local, batch):
        hp = {**context.hp, "local_lr": context.hp["inner_lr"]}
        return client_algorithm.step(context._replace(hp=hp), local, batch)

    return FineTuning(client_algorithm._replace(step=step), epochs=1, steps=1)


def make_per_fedavg_hyperparameters(
    options: PerFedAvgOptions, num_clients: int
) -> PerFedAvgHyperParameters:
    return PerFedAvgHyperParameters(hf_delta=1e-3 if options.order == "hessian_free" else None)


SPEC = AlgorithmSpec(
    "per_fedavg",
    per_fedavg,
    "FedAvg of the loss after one step at each client (Fallah et al., 2020)",
    paper="Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948",
    options=PerFedAvgOptions,
    hyperparameters=make_per_fedavg_hyperparameters,
    protocol="fedamp",
    color="#17BECF",
    evaluated_models=("tuned",),
)
