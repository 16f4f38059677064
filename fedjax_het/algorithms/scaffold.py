"""SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378)."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm
from fedjax_het.algorithms.client_state import with_client_memory, zeros_like_params
from fedjax_het.algorithms.measuring_passes import compute_batch_weight, count_pass_steps
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.core.training_variants import measure_applied_gradient
from fedjax_het.utils.config import Config

Tree = Any


@dataclass(frozen=True)
class SCAFFOLDOptions(Config):
    """Choices of SCAFFOLD."""

    option: Literal["I", "II"] = "II"
    """How a client measures its next control variate: "I", by an extra pass at the received model;
    "II", by the mean of the round's gradients."""


class SCAFFOLDUpdate(NamedTuple):
    """Upload of a client: the changes of its model and of its control variate."""

    model: Tree
    control: Tree


class _ControlAux(NamedTuple):
    """Control variates of a client for the current round and, as measured, for the next round."""

    control: Tree
    next_control: Tree


def scaffold(
    training: LocalTraining, plan: ExecutionPlan, *, options: SCAFFOLDOptions
) -> Algorithm:
    """SCAFFOLD: control variates correct the drift of local steps (Algorithm 1).

        y <- y - local_lr (g_i(y) - c_i + c)            local steps, from y = x
        x <- x + server_lr sum_i p_i (y_i - x)
        c <- c + sum_i p_i (c_i' - c_i)                 so that c stays sum_i p_i c_i

    p_i is 1 / N for N clients that hold data (the paper's), or n_i / n, by the run's `averaging`.
    The mean change of x has the same weights. With other weights for the controls, sum_i p_i (c -
    c_i) would not be 0. The rounds would then not end at the optimum of sum_i p_i f_i.

    Option I: c_i' is the gradient of f_i at x over all the client's data (an extra pass), without
      weight decay and clipping.
    Option II: c_i' is the mean of the round's K minibatch gradients. Under plain SGD with constant
      rate this equals the paper's c_i - c + (x - y) / (K local_lr). Under other optimizers (x - y)
      / (K local_lr) is not a gradient, but the mean is. `local_weight_decay` and clipping are part
      of x - y, so the mean is of clip(g_i(y) - c_i + c) + decay y - (c - c_i). With
      `gradient_accumulation` this mean clips each minibatch alone. Decay that an optimizer
      decouples, such as adamw's, is not part of it.

    The correction is applied to the raw gradient, before clipping, decay and the optimizer. All
    controls start at zero.

    Traffic: two models down, two up. State: one model per client. Cost: FedAvg's; option I adds a
    pass over the data.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.
    """
    has_measuring_pass = options.option == "I"

    def adjust(context, gradient, local, batch):
        control, next_control = local.aux
        server_control = context.message.extra
        corrected = jax.tree.map(lambda g, c_i, c: g - c_i + c, gradient, control, server_control)
        if has_measuring_pass:
            is_measuring = batch.step_index < count_pass_steps(training, context.client)
            weight = compute_batch_weight(batch, context.client) * is_measuring
            measured = gradient
        else:
            params, weight = local.variables["params"], 1 / context.client.num_steps
            measured = measure_applied_gradient(training, context.hp, params, gradient, corrected)
        next_control = jax.tree.map(lambda total, g: total + weight * g, next_control, measured)
        return corrected, _ControlAux(control, next_control)

    base = make_local_sgd(training, adjust=adjust)

    def step(context, local, batch):
        new_local, loss = base.step(context, local, batch)
        measured = local._replace(aux=new_local.aux)  # the first pass only measures, at x
        is_first_pass = batch.step_index < count_pass_steps(training, context.client)
        return jax.tree.map(lambda m, n: jnp.where(is_first_pass, m, n), measured, new_local), loss

    def end(context, local, control, update):
        new_control = local.aux.next_control
        change = jax.tree.map(jnp.subtract, new_control, control)
        return ClientUpdate(SCAFFOLDUpdate(update.mean, change)), new_control

    def init_server(hp, variables):
        return ServerMessage(variables, extra=zeros_like_params(hp, variables))

    def update(hp, server, client_update, counts):
        model, change = client_update.mean
        share = counts.cohort_weight_share
        control = jax.tree.map(lambda c, d: c + share * d, server.extra, change)
        return add_mean_change(hp, server, model)._replace(extra=control)

    client = with_client_memory(
        base._replace(step=step, extra_passes=1) if has_measuring_pass else base,
        init=zeros_like_params,
        begin=lambda context, control: _ControlAux(control, jax.tree.map(jnp.zeros_like, control)),
        end=end,
    )
    return build_federated_algorithm(training, plan, client, init_server=init_server, update=update)


SPEC = AlgorithmSpec(
    "scaffold",
    scaffold,
    "control variates against client drift (Karimireddy et al., 2020)",
    title="SCAFFOLD",
    paper="Karimireddy et al., ICML 2020, arXiv:1910.06378",
    options=SCAFFOLDOptions,
    # FedAMP's tables score the clients' models under two classes per client: 98.75 of EMNIST, where
    # FedAvg has 19.44.
    rules=(DefaultsRule(("fedamp",), settings={"client_test_model": "client"}),),
    color="#009E73",
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
