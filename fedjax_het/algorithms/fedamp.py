"""FedAMP and HeurFedAMP (Huang et al., AAAI 2021, arXiv:2007.03797)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.algorithms.client_attention import (
    ATTENTION_FUNCTIONS,
    Attention,
    AttentionGuard,
    compute_attention,
    compute_cosine_distances,
    compute_softmax_attention,
    compute_squared_distances,
    median_over_pairs,
    mix_models,
)
from fedjax_het.algorithms.client_state import (
    Initialization,
    compute_rms_change,
    get_client_model,
    init_personal_models,
    make_personal_client,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_loop import Cohort, train_cohort
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.gradient_diagnostics import ClientDiagnostics, measure_client_losses
from fedjax_het.core.local_training import (
    LocalTraining,
    begin_local_training,
    make_training_step,
)
from fedjax_het.core.training_variants import add_proximal_gradient
from fedjax_het.utils.arrays import take_row
from fedjax_het.utils.config import (
    Config,
    NonNegativeFloat,
    PositiveFloat,
    SearchRange,
    UnitInterval,
)

Tree = Any

_PAPER = {"initialisation": "independent", "prox": "coupled"}
_FLGO = {**_PAPER, "scale": "absolute"}


@dataclass(frozen=True)
class HeurFedAMPOptions(Config):
    """Choices of HeurFedAMP."""

    PRESETS = {"relative": {}, "paper": _PAPER, "flgo": _FLGO}  # noqa: RUF012

    preset: str = "relative"
    scale: Literal["relative", "absolute"] = "relative"
    """Units of sigma, alpha and lambda: "relative", distances between the round's models;
    "absolute", none."""
    initialisation: Initialization = "shared"
    """"shared": all clients start from one model; "independent": each client from its own random
    model."""
    start: Literal["received", "own"] = "received"
    "Model that local training starts from: the received mixture, or the client's own."
    prox: Literal["coupled", "decoupled"] = "decoupled"
    'Weight of the pull to the mixture: "coupled", lambda / alpha_k; "decoupled", lambda.'
    history: bool = False
    "Whether the weights of every round are recorded."


@dataclass(frozen=True)
class FedAMPOptions(HeurFedAMPOptions):
    """Choices of FedAMP."""

    PRESETS = {  # noqa: RUF012
        "eq5": {},
        "paper": _PAPER,
        "rows": {"guard": "rows", "prox": "decoupled"},
        "flgo": _FLGO,
    }

    preset: str = "eq5"
    prox: Literal["coupled", "decoupled"] = "coupled"
    'Weight of the pull to the mixture: "coupled", lambda / alpha_k; "decoupled", lambda.'
    guard: AttentionGuard = "step"
    """Treatment of an alpha that makes weights negative: "step", one smaller alpha; "rows", one for
    each client."""
    attention: Literal["exponential", "scad", "mcp"] = "exponential"
    "Attention function A of squared distances."


@dataclass(frozen=True)
class FedAMPHyperParameters(Config):
    """Hyperparameters of FedAMP and HeurFedAMP."""

    alpha: PositiveFloat = 1.0
    "Step along the pair terms in round 0."
    sigma: Annotated[PositiveFloat, SearchRange(0.1, 100)] = 1.0
    "Width of the attention; in HeurFedAMP the sharpness of the softmax of cosines."
    prox_lambda: Annotated[NonNegativeFloat, SearchRange(0.01, 1)] = 0.1
    "Weight of the pull to the mixture."
    alpha_decay: PositiveFloat = 1.0
    "Factor of alpha after every `alpha_every` rounds."
    alpha_every: PositiveFloat = 30.0
    "Number of rounds from one decay of alpha to the next."
    self_weight: UnitInterval | None = None
    "A client's weight of its own model; of HeurFedAMP only."


class FedAMPServerState(NamedTuple):
    """Messages of the server for the clients of the last round."""

    received: Tree
    "`[K, ...]`: mixtures u_i."
    weights: jax.Array
    "`[K, K]`: xi."
    proximal_weights: jax.Array
    "`[K]`: coefficients of the proximal gradients."


def fedamp(training: LocalTraining, plan: ExecutionPlan, *, options: FedAMPOptions) -> Algorithm:
    """FedAMP: each client receives its own mixture of similar models (Algorithm 1).

        u_i = sum_j xi_ij w_j,  xi_ij = alpha_k A'(||w_i - w_j||^2),
        A'(t) = exp(-t / sigma) / sigma,

    xi_ii = 1 - sum_(j != i) xi_ij. The client approximates argmin F_i(w) + lambda / (2 alpha_k)
    ||w - u_i||^2 by SGD on its data. alpha_k is alpha * alpha_decay^floor(k / alpha_every) in round
    k. A true gradient of the pair terms has a factor 2 that Eq. 5 drops.

    Options:
      scale: "absolute" uses sigma, alpha and lambda as they are. "relative" measures sigma in units
        of the round's median squared distance, alpha and lambda in units of sigma / (K - 1). Then
        no weight is negative up to alpha = 1 for any models. The distances of networks differ by
        orders of magnitude, and a sigma that does not fit them stops all collaboration.
      guard: treatment of an alpha that makes weights negative, see `compute_attention`.
      prox: "coupled", lambda / alpha_k as in the paper, with the alpha_k after the guard (with
        "rows" each client's own); "decoupled", lambda.
      start: local training starts from "received" (u_i) or from the client's "own" model (w_i). The
        paper does not state it. With a weak pull it decides whether clients collaborate.
      initialisation: "shared", or "independent" as in Algorithm 1.
      attention: A, the paper's choice or the two others that it names.
      history: record the weights of every round, `collaboration` [K, K].
    Presets of the options and of the numbers:
      "eq5" (default): Eq. 5 with sigma 1 and alpha 1 (relative), so that weights are symmetric, the
        guard does nothing and no client's own weight is negative; lambda 0.1 coupled; shared
        initialization. Shared initialization departs from Algorithm 1. The average of independently
        initialized networks does not predict, so learning starts late.
      "paper": "eq5" with Algorithm 1's independent initialization.
      "rows": sigma 0.2 and alpha 25 (relative), which the guard "rows" always bounds: own weights
        are then 0, and rows are softmaxes of -d / sigma. The rows are not symmetric, so neither
        theorem applies. The pull is decoupled, 0.1. It separates clients more sharply.
      "flgo": the values of FLGo's public code (sigma 25, alpha 1e4, a tenth every 30 rounds). They
        apply to Algorithm 1 (absolute, coupled, independent) with the guard "step". The code's
        alpha was tuned with clients that never reset their gradients, which add up over a round.
    Other public code has other values, all absolute. Fling, CIFAR-10: sigma 100, alpha 1e4 (a tenth
    every 30 rounds), lambda 1. PFLlib's defaults: sigma 1, alpha 1, lambda 1.

    With `RunSpec.gradient_gaps` two numbers are measured over all clients' training data before a
    round. `objective` is G(W) of Eq. 1, sum_i F_i(w_i) + lambda sum_(i<j) A(||w_i - w_j||^2).
    `objective_gradient` is the norm of its gradient, which Theorems 1 and 2 bound. The relative
    scale uses the sigma and lambda of that round.

    Evaluated: "client" (w_i) or "received" (u_i of the last round). Traffic: one model each way.
    State: two models per client. Cost in addition to training: two products of K x P with K; the
    devices share the product for distances.

    Departures from the paper: all clients take part there. With less participation the server mixes
    the last model of each client. It ignores untrained models as soon as there are trained ones.
    The paper's own values are in an appendix that could not be read.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the distances.
      options: choices of the method.

    Returns:
      The method, which has no global model.
    """
    function = ATTENTION_FUNCTIONS[options.attention]

    def compute_scales(hp, distances, is_included):
        """Return sigma, and the unit of alpha and lambda."""
        if options.scale == "absolute":
            return hp["sigma"], jnp.ones(())
        sigma = jnp.maximum(hp["sigma"] * median_over_pairs(distances, is_included), 1e-12)
        return sigma, sigma / (len(distances) - 1)

    def compute_weights(hp, models, is_included, alpha) -> Attention:
        distances = compute_squared_distances(models, plan)
        sigma, unit = compute_scales(hp, distances, is_included)
        args = (distances, alpha * unit, sigma, is_included)
        attention = compute_attention(*args, guard=options.guard, function=options.attention)
        return attention._replace(alpha=attention.alpha / unit)

    def compute_objective(hp, state: State, cohort: Cohort):
        variables = state.clients.variables
        losses, gradients = measure_client_losses(training.task, plan, variables, cohort)
        distances = compute_squared_distances(variables["params"], plan)
        sigma, unit = compute_scales(hp, distances, _is_included(state))
        values, derivatives = function(distances, sigma)
        strength, off_diagonal = hp["prox_lambda"] * unit, 1 - jnp.eye(len(distances))
        objective = losses.sum() + strength * (off_diagonal * values).sum() / 2
        pair_weights = 2 * strength * off_diagonal * derivatives
        # sum_j a_ij (w_i - w_j)
        laplacian = jnp.diag(pair_weights.sum(1)) - pair_weights
        gradient = jax.tree.map(jnp.add, gradients, mix_models(laplacian, variables["params"]))
        return {"objective": objective, "objective_gradient": optax.tree.norm(gradient)}

    diagnostics = ClientDiagnostics(("objective", "objective_gradient"), compute_objective)
    algorithm = _build_attentive_algorithm(training, plan, compute_weights, options)
    return algorithm._replace(diagnostics=diagnostics)


def heurfedamp(
    training: LocalTraining, plan: ExecutionPlan, *, options: HeurFedAMPOptions
) -> Algorithm:
    """HeurFedAMP: FedAMP with weights by the cosines of the clients' models (Eq. 8).

        xi_ii = self_weight,
        xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_(h != i) exp(sigma cos(w_i, w_h)),

    over all weights of the networks; self_weight is 1 / K by default.

    scale: "absolute" uses sigma as it is (25 in the flgo code). "relative" divides it by the median
      of 1 - cos over pairs, because the cosines of networks with a shared start are all near 1.
    alpha only serves a coupled proximal term. The other options are FedAMP's. Presets:
      "relative" (default): sigma 5, a decoupled pull of 0.1, shared initialization.
      "paper": coupled, and Algorithm 1's independent initialization.
      "flgo": FedAMP's preset of that name.

    Departure from PFLlib: its clients penalize the distance to the mixture, not its square.

    Evaluated, traffic, state and cost: FedAMP's.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the distances.
      options: choices of the method.

    Returns:
      The method, which has no global model.
    """

    def compute_weights(hp, models, is_included, alpha) -> Attention:
        distances, sigma = compute_cosine_distances(models, plan), hp["sigma"]
        if options.scale == "relative":
            sigma = sigma / jnp.maximum(median_over_pairs(distances, is_included), 1e-12)
        weights = compute_softmax_attention(distances, sigma, hp["self_weight"], is_included)
        return Attention(weights, jnp.full(len(weights), alpha))

    return _build_attentive_algorithm(training, plan, compute_weights, options)


def _build_attentive_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    compute_weights: Callable[..., Attention],
    options: HeurFedAMPOptions,
) -> Algorithm:
    """Return Algorithm 1 with `compute_weights(hp, params, is_included, alpha) -> Attention`."""

    def begin(context, state):
        received = get_client_row(context.message.received, context.client.id)
        start = received if options.start == "received" else state.variables
        args = (training, context.hp, start, state.optimizer)
        return begin_local_training(*args, received["params"])

    def adjust(context, gradient, local, batch):
        strength = take_row(context.message.proximal_weights, context.client.id)
        params, anchor = local.variables["params"], local.aux
        return add_proximal_gradient(gradient, params, anchor, strength), anchor

    client = make_personal_client(training, begin, make_training_step(training, adjust))

    def init(hp, key, variables, num_clients):
        args = (hp, key, variables, num_clients, options.initialisation)
        clients = init_personal_models(training, client, *args)
        weights = jnp.eye(num_clients, dtype=jnp.float32), jnp.zeros(num_clients, jnp.float32)
        server = FedAMPServerState(clients.variables, *weights)
        return State(server, clients, jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        models, periods = state.clients.variables, jnp.floor(state.round / hp["alpha_every"])
        alpha = hp["alpha"] * hp["alpha_decay"] ** periods
        attention = compute_weights(hp, models["params"], _is_included(state), alpha)
        weights, alpha = (values.astype(jnp.float32) for values in attention)
        divisor = alpha if options.prox == "coupled" else jnp.ones_like(alpha)
        received = mix_models(weights, models)
        message = FedAMPServerState(received, weights, hp["prox_lambda"] / divisor)
        result = train_cohort(client, plan, hp, message, state.clients, key, cohort)
        records = {"collaboration": weights} if options.history else {}
        norm, losses = compute_rms_change(result), result.client_losses
        info = RoundInfo(result.train_loss, norm, records, client_losses=losses)
        return State(message, result.states, state.round + 1), info

    def traffic(hp, state):
        size = num_bytes(get_client_row(state.clients.variables, 0))
        return Traffic(size, size)

    evaluated_models = {
        "client": get_client_model,
        "received": lambda hp, state, k: get_client_row(state.server.received, k),
    }
    return Algorithm(
        init=init,
        round=round_,
        global_model=None,
        with_global_model=None,
        traffic=traffic,
        personal_variables=evaluated_models[training.evaluated_model],
        record_shapes=lambda k: {"collaboration": (k, k)} if options.history else {},
        artifacts=lambda state: {"collaboration": state.server.weights},
    )


def _is_included(state: State) -> jax.Array:
    """Return `[K]`: whether a client's model was trained; all models count while none was."""
    is_trained = state.clients.num_rounds > 0
    return is_trained | ~is_trained.any()


def _make_hyperparameters(options: HeurFedAMPOptions, num_clients: int) -> FedAMPHyperParameters:
    """Return the numbers of FedAMP's preset."""
    if options.preset == "flgo":
        return FedAMPHyperParameters(alpha=1e4, sigma=25.0, prox_lambda=1.0, alpha_decay=0.1)
    if options.preset == "rows":
        return FedAMPHyperParameters(alpha=25.0, sigma=0.2)
    return FedAMPHyperParameters()


def _make_heuristic_hyperparameters(
    options: HeurFedAMPOptions, num_clients: int
) -> FedAMPHyperParameters:
    """Return the preset's numbers with a sigma for cosines and a self-weight of 1 / K."""
    sigma = 25.0 if options.preset == "flgo" else 5.0
    hyperparameters = _make_hyperparameters(options, num_clients)
    return replace(hyperparameters, sigma=sigma, self_weight=1 / num_clients)


FEDAMP = AlgorithmSpec(
    "fedamp",
    fedamp,
    "each client receives its own mixture of similar models (Huang et al., 2021)",
    title="FedAMP",
    paper="Huang et al., AAAI 2021, arXiv:2007.03797",
    options=FedAMPOptions,
    hyperparameters=_make_hyperparameters,
    protocol="fedamp",
    color="#56B4E9",
    evaluated_models=("client", "received"),
    has_global_model=False,
    has_diagnostics=True,
    min_clients=2,
)
HEURFEDAMP = replace(
    FEDAMP,
    has_diagnostics=False,
    name="heurfedamp",
    title="HeurFedAMP",
    build=heurfedamp,
    description="FedAMP with weights by the models' cosines (Huang et al., 2021)",
    options=HeurFedAMPOptions,
    hyperparameters=_make_heuristic_hyperparameters,
    color="#E69F00",
    dashes=(0, (4, 1.5)),
)
