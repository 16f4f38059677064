"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948)."""

from dataclasses import dataclass
from typing import Annotated, Literal

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
    make_local_sgd,
)
from fedjax_het.core.training_variants import make_local_model_training, with_plain_sgd
from fedjax_het.utils.config import Config, NonNegativeFloat, PositiveFloat, SearchRange


@dataclass(frozen=True)
class PerFedAvgOptions(Config):
    """Choices of Per-FedAvg."""

    order: Literal["first", "hessian_free", "exact"] = "first"
    """How the Hessian is treated: "first" leaves it out, "hessian_free" takes a difference of
    gradients, "exact" differentiates."""


@dataclass(frozen=True)
class PerFedAvgHyperParameters(Config):
    """Hyperparameters of Per-FedAvg."""

    inner_lr: Annotated[NonNegativeFloat, SearchRange(0.001, 0.1)] = 0.01
    "Learning rate of the step on its own data that each client's model is optimized for."
    hf_delta: PositiveFloat | None = None
    'Length of the difference of gradients; with order "hessian_free" only.'


def per_fedavg(
    training: LocalTraining, plan: ExecutionPlan, *, options: PerFedAvgOptions
) -> Algorithm:
    """Per-FedAvg: FedAvg of the loss that a client has after one step on its data (Algorithm 1).

    A local step takes two consecutive minibatches D, D' of the client (possibly of two epochs):

        w' = w - inner_lr grad f(w; D),
        w <- w - local_lr (I - inner_lr H(w; D')) grad f(w'; D').

    The second step is the local optimizer's. A last odd minibatch is both D and D', as for a client
    with one minibatch per round.

    order: the treatment of the Hessian H. "first" (FO) leaves it out, the default of most public
      code. "hessian_free" (HF) takes H g as the difference of the gradients at w +- hf_delta g by
      2 hf_delta. "exact" differentiates the gradient along g.

    Batch-norm statistics include all minibatches of real samples. The reported loss is the mean
    over the losses at w and at w'; of a last odd minibatch the loss at w. Defaults: inner_lr 0.01
    and hf_delta 1e-3, from FL-bench (KarhouTam/FL-bench).

    Evaluated: the global model after one plain step of inner_lr on one minibatch of the client.
    Traffic: one model down, one up. State: none. Cost: one gradient per minibatch, two of a last
    odd one. Every second minibatch costs two more with HF, and about as much with "exact". Lanes in
    lockstep pay for all branches in every step.

    Departure from the paper: it draws a third minibatch for the Hessian. Here the Hessian has D',
    so that all orders do the same number of steps on the same minibatches.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.
    """
    base, order = make_local_sgd(training), options.order

    def begin(context, state):
        # `aux` are the variables at which the next gradient is taken: w, then w'.
        return base.begin(context, state)._replace(aux=context.message.variables)

    def step(context, local, batch):
        hp, w = context.hp, local.variables["params"]

        def loss_and_gradient_at(variables):
            return training.task.loss_and_gradient(variables, batch, context.key)

        def gradient_at(params):
            return loss_and_gradient_at({**local.variables, "params": params})[1]

        def look_ahead(local, gradient, variables):
            params = _add_scaled(w, gradient, -hp["inner_lr"])
            return local._replace(aux={**variables, "params": params})

        def apply_meta_gradient(local, gradient, variables):
            if order != "first":
                delta = hp["hf_delta"] if order == "hessian_free" else None
                product = _hessian_product(gradient_at, w, gradient, delta)
                gradient = _add_scaled(gradient, product, -hp["inner_lr"])
            variables, optimizer = {**variables, "params": w}, local.optimizer_state
            updated = apply_gradient(training, context, variables, gradient, optimizer, batch)
            return ClientTrainState(*updated, updated[0])

        def look_ahead_and_apply(local, gradient, variables):
            ahead = look_ahead(local, gradient, variables)
            return apply_meta_gradient(ahead, *loss_and_gradient_at(ahead.aux)[1:])

        loss, gradient, variables = loss_and_gradient_at(local.aux)
        is_second = batch.step_index % 2
        is_unpaired = (is_second == 0) & (batch.step_index + 1 == context.client.num_steps)
        branch = jnp.where(is_unpaired, 2, is_second)
        branches = (look_ahead, apply_meta_gradient, look_ahead_and_apply)
        return jax.lax.switch(branch, branches, local, gradient, variables), loss

    tuning_client = make_local_model_training(with_plain_sgd(training))

    def tuning_step(context, local, batch):
        hp = {**context.hp, "local_lr": context.hp["inner_lr"]}
        return tuning_client.step(context._replace(hp=hp), local, batch)

    client = base._replace(begin=begin, step=step)
    return build_federated_algorithm(training, plan, client)._replace(
        fine_tuning=FineTuning(tuning_client._replace(step=tuning_step), epochs=1, steps=1)
    )


def _add_scaled(tree, direction, scale):
    return jax.tree.map(lambda a, d: a + scale * d, tree, direction)


def _hessian_product(gradient_at, params, vector, delta):
    """Return H(params) vector: exact, or by a central difference over `delta`."""
    if delta is None:
        return jax.jvp(gradient_at, (params,), (vector,))[1]
    forward, backward = (gradient_at(_add_scaled(params, vector, s * delta)) for s in (1, -1))
    return jax.tree.map(lambda a, b: (a - b) / (2 * delta), forward, backward)


def _make_hyperparameters(options: PerFedAvgOptions, num_clients: int) -> PerFedAvgHyperParameters:
    """Return the numbers; the order "hessian_free" has a difference of 1e-3."""
    return PerFedAvgHyperParameters(hf_delta=1e-3 if options.order == "hessian_free" else None)


SPEC = AlgorithmSpec(
    "per_fedavg",
    per_fedavg,
    "FedAvg of the loss after one step at each client (Fallah et al., 2020)",
    title="Per-FedAvg",
    paper="Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948",
    options=PerFedAvgOptions,
    hyperparameters=_make_hyperparameters,
    color="#17BECF",
    evaluated_models=("tuned",),
)
