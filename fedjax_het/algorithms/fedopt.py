"""Server optimisers on the clients' mean change: FedAvgM (Hsu, Qi and Brown, 2019,
arXiv:1909.06335), FedAdam and FedYogi (Reddi et al., ICLR 2021, arXiv:2003.00295)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import (
    CohortCounts,
    add_mean_change,
    build_federated_algorithm,
    model_traffic,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.utils.config import Config, MomentumCoefficient, NonNegativeFloat, PositiveFloat

Tree = Any


@dataclass(frozen=True)
class FedAvgMOptions(Config):
    nesterov: bool = False
    "Whether the step looks ahead by the momentum."
    damped: bool = False
    "Whether the mean change counts 1 - `server_momentum`."


@dataclass(frozen=True)
class FedAvgMHyperParameters(Config):
    server_momentum: MomentumCoefficient = 0.9
    "Of the mean change; 0 is FedAvg."


@dataclass(frozen=True)
class AdaptiveServerHyperParameters(Config):
    """Of FedAdam and FedYogi."""

    server_lr: NonNegativeFloat = 0.01
    "Of the server's step."
    server_beta1: MomentumCoefficient = 0.9
    "Decay of the mean of the changes."
    server_beta2: MomentumCoefficient = 0.99
    "Decay of the mean of their squares."
    server_tau: PositiveFloat = 1e-3
    "Added to the root of the latter: the smaller, the more adaptive."


class AdaptiveMoments(NamedTuple):
    """m and v of the mean change, of the parameters' structure."""

    mean: Tree
    square: Tree


def fedavgm(
    training: LocalTraining, plan: ExecutionPlan, *, options: FedAvgMOptions = FedAvgMOptions()
) -> Algorithm:
    """v <- server_momentum v + mean(w - w_i), w <- w - server_lr v.

    The momentum (0.9) is not damped: after many rounds alike w moves 1 / (1 - server_momentum)
    times as far as FedAvg's, whose server_lr of 1 it keeps. server_momentum 0 is FedAvg.
    damped: v <- server_momentum v + (1 - server_momentum) mean(w - w_i), as MOON's code has it:
    steps ten times smaller, which is server_lr 0.1. nesterov: w <- w - server_lr (server_momentum v
    + mean(w - w_i)), with the new v, as some call the method (FL-bench).

    As all methods of this file: the mean takes the run's `averaging`, batch-norm statistics are
    averaged as in FedAvg, and a round in which no client has data changes nothing, v included.
    Traffic: FedAvg's, as v stays with the server. State: one more model on the server.
    """

    def make_optimizer(hp):
        # v is linear in the changes: damping them is damping the step.
        lr = hp["server_lr"] * (1 - hp["server_momentum"] if options.damped else 1)
        return optax.sgd(lr, momentum=hp["server_momentum"], nesterov=options.nesterov)

    return _build_server_optimized(training, plan, make_optimizer)


def fedadam(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """Algorithm 2 with Adam: of the clients' mean change D, entry by entry,

        m <- beta1 m + (1 - beta1) D,   v <- beta2 v + (1 - beta2) D^2,
        w <- w + server_lr m / (sqrt(v) + tau),

    m from 0 and v from tau^2 on, the least that Algorithm 2 allows; beta1 0.9, beta2 0.99, tau 1e-3
    as in the paper's experiments.
    There is no bias correction in it, which `optax.adam` has: the first step of an entry whose
    change is d is server_lr (1 - beta1) d / (sqrt(beta2 tau^2 + (1 - beta2) d^2) + tau).

    server_lr is tuned for each task there; the default, 0.01, is a choice made here, and has to be
    tuned too: an entry moves by about server_lr at most, whatever the local steps.
    Traffic: FedAvg's. State: two more models on the server.
    """

    def update_square(hp, v, d2):
        return hp["server_beta2"] * v + (1 - hp["server_beta2"]) * d2

    return _build_server_optimized(
        training, plan, lambda hp: _make_adaptive_optimizer(hp, update_square)
    )


def fedyogi(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedAdam with Yogi's v <- v - (1 - beta2) D^2 sign(v - D^2), which forgets a large v more
    slowly. All else as `fedadam`."""

    def update_square(hp, v, d2):
        return v - (1 - hp["server_beta2"]) * d2 * jnp.sign(v - d2)

    return _build_server_optimized(
        training, plan, lambda hp: _make_adaptive_optimizer(hp, update_square)
    )


def _build_server_optimized(
    training: LocalTraining,
    plan: ExecutionPlan,
    make_optimizer: Callable[[dict], optax.GradientTransformation],
) -> Algorithm:
    """FedAvg, whose server takes the mean of w - w_i for a gradient."""

    def init_server(hp, variables):
        return ServerMessage(variables, extra=make_optimizer(hp).init(variables["params"]))

    def update_server(hp, server, client_update: ClientUpdate, counts: CohortCounts):
        gradient = jax.tree.map(jnp.negative, client_update.mean["params"])
        params = server.variables["params"]
        updates, optimizer_state = make_optimizer(hp).update(gradient, server.extra, params)
        variables = add_mean_change(hp, server, client_update.mean).variables
        new_server = ServerMessage(
            {**variables, "params": optax.apply_updates(params, updates)}, optimizer_state
        )
        return jax.tree.map(
            lambda new, old: jnp.where(counts.num_trained > 0, new, old), new_server, server
        )

    algorithm = build_federated_algorithm(
        training, plan, make_local_sgd(training), init_server=init_server, update=update_server
    )
    return algorithm._replace(traffic=model_traffic)


def _make_adaptive_optimizer(hp, update_square: Callable) -> optax.GradientTransformation:
    """Algorithm 2's step, with v by `update_square(hp, v, squared change)`."""

    def init(params):
        return AdaptiveMoments(
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(lambda p: jnp.full_like(p, hp["server_tau"] ** 2), params),
        )

    def update(gradient, moments, params=None):
        beta1 = hp["server_beta1"]
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments.mean, gradient)
        square = jax.tree.map(lambda v, g: update_square(hp, v, g * g), moments.square, gradient)
        updates = jax.tree.map(
            lambda m, v: -hp["server_lr"] * m / (jnp.sqrt(v) + hp["server_tau"]), mean, square
        )
        return updates, AdaptiveMoments(mean, square)

    return optax.GradientTransformation(init, update)


FEDAVGM = AlgorithmSpec(
    "fedavgm",
    fedavgm,
    "FedAvg with momentum at the server (Hsu et al., 2019)",
    paper="Hsu, Qi and Brown, 2019, arXiv:1909.06335",
    options=FedAvgMOptions,
    hyperparameters=FedAvgMHyperParameters,
    color="#3F51B5",
    server_step="own",
    wrappable_as="model",
    evaluated_models=("global", "client"),
)
FEDADAM = AlgorithmSpec(
    "fedadam",
    fedadam,
    "FedAvg with Adam at the server (Reddi et al., 2021)",
    paper="Reddi et al., ICLR 2021, arXiv:2003.00295",
    hyperparameters=AdaptiveServerHyperParameters,
    color="#B15928",
    server_step="own",
    wrappable_as="model",
    evaluated_models=("global", "client"),
)
FEDYOGI = replace(
    FEDADAM,
    name="fedyogi",
    build=fedyogi,
    description="FedAvg with Yogi at the server (Reddi et al., 2021)",
    color="#FB9A99",
)
