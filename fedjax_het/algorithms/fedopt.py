"""FedAvgM, FedAdagrad, FedAdam and FedYogi: server optimizers on the clients' mean change.

Sources: Hsu, Qi and Brown, 2019, arXiv:1909.06335; Reddi et al., ICLR 2021, arXiv:2003.00295.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm, model_traffic
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.utils.config import (
    Config,
    MomentumCoefficient,
    NonNegativeFloat,
    PositiveFloat,
    SearchRange,
)

Tree = Any


@dataclass(frozen=True)
class FedAvgMOptions(Config):
    """Choices of FedAvgM."""

    nesterov: bool = False
    "Whether the step looks ahead by the momentum."
    damped: bool = False
    "Whether the mean change is multiplied by 1 - `server_momentum`."


@dataclass(frozen=True)
class FedAvgMHyperParameters(Config):
    """Hyperparameters of FedAvgM."""

    server_momentum: Annotated[MomentumCoefficient, SearchRange(0.5, 0.95, is_log=False)] = 0.9
    "Momentum of the mean change; 0 is FedAvg."


@dataclass(frozen=True)
class AdaptiveServerHyperParameters(Config):
    """Hyperparameters of FedAdam and FedYogi."""

    server_lr: Annotated[NonNegativeFloat, SearchRange(0.001, 1)] = 0.01
    "Learning rate of the server."
    server_beta1: MomentumCoefficient = 0.9
    "Decay of the mean of the changes."
    server_beta2: MomentumCoefficient = 0.99
    "Decay of the mean of the squared changes."
    server_tau: Annotated[PositiveFloat, SearchRange(0.0001, 0.1)] = 1e-3
    "Number added to the root of the mean square; a smaller number adapts more."


@dataclass(frozen=True)
class FedAdagradHyperParameters(Config):
    """Hyperparameters of FedAdagrad."""

    server_lr: Annotated[NonNegativeFloat, SearchRange(0.001, 1)] = 0.1
    "Learning rate of the server."
    server_beta1: MomentumCoefficient = 0.0
    "Decay of the mean of the changes."
    server_tau: Annotated[PositiveFloat, SearchRange(0.0001, 0.1)] = 1e-3
    "Number added to the root of the sum of squares; a smaller number adapts more."


class AdaptiveMoments(NamedTuple):
    """Averages or sums of the mean change and of its square, like the parameters."""

    mean: Tree
    square: Tree


def fedavgm(training: LocalTraining, plan: ExecutionPlan, *, options: FedAvgMOptions) -> Algorithm:
    """FedAvgM: the server steps along the mean change with momentum (section 4.2).

        v <- server_momentum v + mean(w - w_i),   w <- w - server_lr v.

    The momentum (0.9) is not damped: after many equal rounds w moves 1 / (1 - server_momentum)
    times as far as in FedAvg. The default server_lr is 1, as in FedAvg. server_momentum 0 is
    FedAvg. The mean has the weights of the run's `averaging`; batch-norm statistics are averaged as
    in FedAvg. A round in which no client has data changes nothing, v included.

    damped: v <- server_momentum v + (1 - server_momentum) mean(w - w_i), as in MOON's code. The
      steps correspond to a server_lr ten times smaller.
    nesterov: w <- w - server_lr (server_momentum v + mean(w - w_i)), with the new v, the method of
      that name in FL-bench.

    Traffic: one model down, one up. State: one more model on the server. Cost: FedAvg's.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.
    """

    def make_optimizer(hp):
        # v is linear in the changes: damping them is damping the step.
        lr = hp["server_lr"] * (1 - hp["server_momentum"] if options.damped else 1)
        return optax.sgd(lr, momentum=hp["server_momentum"], nesterov=options.nesterov)

    return _build_server_optimized(training, plan, make_optimizer)


def fedadam(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedAdam: the server steps along the mean change D by Adam (Algorithm 2), entry by entry.

        m <- beta1 m + (1 - beta1) D,   v <- beta2 v + (1 - beta2) D^2,
        w <- w + server_lr m / (sqrt(v) + tau),

    with m = 0 and v = tau^2 at first, the smallest v that Algorithm 2 allows. beta1 0.9, beta2 0.99
    and tau 1e-3 come from the paper's experiments. Algorithm 2 has no bias correction, unlike
    `optax.adam`. Flower's FedAdam and FedYogi differ: v starts at 0, and the rate is corrected for
    bias with the exponent t + 1 in round t = 1, 2, ... The first step of an entry whose change is d
    is server_lr (1 - beta1) d / (sqrt(beta2 tau^2 + (1 - beta2) d^2) + tau). The paper tunes
    server_lr for each task. The default 0.01 is a choice of this package: an entry moves by about
    server_lr at most per round. The mean has the weights of the run's `averaging`; batch-norm
    statistics are averaged as in FedAvg. A round in which no client has data changes nothing.

    Traffic: one model down, one up. State: two more models on the server. Cost: FedAvg's.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """

    def update_square(hp, v, d2):
        return hp["server_beta2"] * v + (1 - hp["server_beta2"]) * d2

    return _build_server_optimized(training, plan, partial(_make_adaptive_optimizer, update_square))


def fedyogi(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedYogi: FedAdam with Yogi's second moment (Algorithm 2).

        v <- v - (1 - beta2) D^2 sign(v - D^2),

    which decreases a large v more slowly. Traffic, state and cost: FedAdam's.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """

    def update_square(hp, v, d2):
        return v - (1 - hp["server_beta2"]) * d2 * jnp.sign(v - d2)

    return _build_server_optimized(training, plan, partial(_make_adaptive_optimizer, update_square))


def fedadagrad(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedAdagrad: FedAdam with Adagrad's second moment, a sum (Algorithm 2).

        v <- v + D^2,

    with m, D and the step of FedAdam, and v = tau^2 at first. The steps of an entry never become
    longer again: equal changes give steps proportional to 1 / sqrt(t) in round t. Adagrad has no
    momentum, so beta1 is 0 as in the paper's experiments, and tau is 1e-3 as there. The paper tunes
    server_lr for each task; 0.1 is the default of Flower's FedAdagrad. Departure from Flower: its v
    starts at 0. Traffic, state and cost: FedAdam's.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """

    def update_square(hp, v, d2):
        return v + d2

    return _build_server_optimized(training, plan, partial(_make_adaptive_optimizer, update_square))


def _build_server_optimized(
    training: LocalTraining,
    plan: ExecutionPlan,
    make_optimizer: Callable[[dict], optax.GradientTransformation],
) -> Algorithm:
    """Return FedAvg, whose server takes the mean of w - w_i for a gradient."""

    def init_server(hp, variables):
        return ServerMessage(variables, extra=make_optimizer(hp).init(variables["params"]))

    def update_server(hp, server, client_update, counts):
        gradient = jax.tree.map(jnp.negative, client_update.mean["params"])
        params = server.variables["params"]
        updates, moments = make_optimizer(hp).update(gradient, server.extra, params)
        variables = dict(add_mean_change(hp, server, client_update.mean).variables)
        variables["params"] = optax.apply_updates(params, updates)
        is_any = counts.num_trained > 0
        new_server = ServerMessage(variables, moments)
        return jax.tree.map(lambda new, old: jnp.where(is_any, new, old), new_server, server)

    client = make_local_sgd(training)
    return build_federated_algorithm(
        training, plan, client, init_server=init_server, update=update_server
    )._replace(traffic=model_traffic)


def _make_adaptive_optimizer(update_square: Callable, hp) -> optax.GradientTransformation:
    """Return Algorithm 2's step, with v by `update_square(hp, v, squared change)`."""
    beta1, tau = hp["server_beta1"], hp["server_tau"]

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdaptiveMoments(zeros, jax.tree.map(lambda p: jnp.full_like(p, tau**2), params))

    def update(gradient, moments, params=None):
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments.mean, gradient)
        square = jax.tree.map(lambda v, g: update_square(hp, v, g * g), moments.square, gradient)
        lr = hp["server_lr"]
        updates = jax.tree.map(lambda m, v: -lr * m / (jnp.sqrt(v) + tau), mean, square)
        return updates, AdaptiveMoments(mean, square)

    return optax.GradientTransformation(init, update)


FEDAVGM = AlgorithmSpec(
    "fedavgm",
    fedavgm,
    "FedAvg with momentum at the server (Hsu et al., 2019)",
    title="FedAvgM",
    paper="Hsu, Qi and Brown, 2019, arXiv:1909.06335",
    options=FedAvgMOptions,
    hyperparameters=FedAvgMHyperParameters,
    color="#3F51B5",
    server_step="own",
    wrappable_as="model",
    evaluated_models=("global", "client"),
)
FEDADAM = replace(
    FEDAVGM,
    name="fedadam",
    title="FedAdam",
    build=fedadam,
    description="FedAvg with Adam at the server (Reddi et al., 2021)",
    paper="Reddi et al., ICLR 2021, arXiv:2003.00295",
    options=Config,
    hyperparameters=AdaptiveServerHyperParameters,
    color="#B15928",
)
FEDYOGI = replace(
    FEDADAM,
    name="fedyogi",
    title="FedYogi",
    build=fedyogi,
    description="FedAvg with Yogi at the server (Reddi et al., 2021)",
    color="#FB9A99",
)
FEDADAGRAD = replace(
    FEDADAM,
    name="fedadagrad",
    title="FedAdagrad",
    build=fedadagrad,
    description="FedAvg with Adagrad at the server (Reddi et al., 2021)",
    hyperparameters=FedAdagradHyperParameters,
    color="#E7298A",
)
