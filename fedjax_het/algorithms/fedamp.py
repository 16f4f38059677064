"""FedAMP and HeurFedAMP (Huang et al., AAAI 2021, arXiv:2007.03797)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

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
from fedjax_het.algorithms.separate import (
    Initialization,
    PersonalModelState,
    compute_rms_change,
    get_client_model,
    init_personal_models,
    make_personal_model_end,
    make_personal_model_init,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientAlgorithm
from fedjax_het.core.client_loop import Cohort, train_cohort
from fedjax_het.core.contract_checks import with_contract_checks
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.gradient_diagnostics import ClientDiagnostics, measure_client_losses
from fedjax_het.core.local_training import (
    LocalTraining,
    add_proximal_gradient,
    begin_local_training,
    make_training_step,
)
from fedjax_het.utils.arrays import take_row
from fedjax_het.utils.config import Config, NonNegativeFloat, PositiveFloat, UnitInterval

Tree = Any

_PAPER = {"initialisation": "independent", "prox": "coupled"}
_FLGO = {**_PAPER, "scale": "absolute"}


@dataclass(frozen=True)
class HeurFedAMPOptions(Config):
    """See `fedamp` for what each is."""

    PRESETS = {"relative": {}, "paper": _PAPER, "flgo": _FLGO}  # noqa: RUF012

    preset: str = "relative"
    scale: Literal["relative", "absolute"] = "relative"
    "Units of sigma, alpha and lambda: the distances between the round's models, or none."
    initialisation: Initialization = "shared"
    "Whether clients start from one model or each from its own."
    start: Literal["received", "own"] = "received"
    "What local training starts from: the mixture received, or the client's own model."
    prox: Literal["coupled", "decoupled"] = "decoupled"
    "Whether the pull towards the mixture is lambda / alpha_k or lambda."
    history: bool = False
    "Whether the weights of every round are recorded."


@dataclass(frozen=True)
class FedAMPOptions(HeurFedAMPOptions):
    PRESETS = {  # noqa: RUF012
        "eq5": {},
        "paper": _PAPER,
        "rows": {"guard": "rows", "prox": "decoupled"},
        "flgo": _FLGO,
    }

    preset: str = "eq5"
    prox: Literal["coupled", "decoupled"] = "coupled"
    "Whether the pull towards the mixture is lambda / alpha_k or lambda."
    guard: AttentionGuard = "step"
    "What becomes of an alpha that makes weights negative."
    attention: Literal["exponential", "scad", "mcp"] = "exponential"
    "The function A of squared distances."


@dataclass(frozen=True)
class FedAMPHyperParameters(Config):
    alpha: PositiveFloat = 1.0
    "Step along the pair terms, in round 0."
    sigma: PositiveFloat = 1.0
    "Width of the attention; of HeurFedAMP how sharply it tells cosines apart."
    prox_lambda: NonNegativeFloat = 0.1
    "Of the pull towards the mixture."
    alpha_decay: PositiveFloat = 1.0
    "What alpha is multiplied by, every `alpha_every` rounds."
    alpha_every: PositiveFloat = 30.0
    "Rounds between."
    self_weight: UnitInterval | None = None
    "HeurFedAMP's alone."


class FedAMPServerState(NamedTuple):
    """What the server made of the clients' models for their round.

    received [K, ...]: u_i. weights [K, K]: xi. pull: [K] the coefficients of the proximal gradient.
    """

    received: Tree
    weights: jax.Array
    proximal_weights: jax.Array


def fedamp(
    training: LocalTraining, plan: ExecutionPlan, *, options: FedAMPOptions = FedAMPOptions()
) -> Algorithm:
    """Algorithm 1: the server sends client i its own mixture of all models,

        u_i = sum_j xi_ij w_j,  xi_ij = alpha_k A'(||w_i - w_j||^2),
        A'(t) = exp(-t / sigma) / sigma,

    xi_ii what is left of 1; the client approximates argmin F_i(w) + lambda / (2 alpha_k)
    ||w - u_i||^2 by SGD on its data. alpha_k is alpha * alpha_decay^floor(k / alpha_every).
    A true gradient of the pair terms has a factor 2 that Eq. 5 drops.

    Options; the paper's own values are in an appendix that could not be read:
      scale: "absolute" takes sigma, alpha and lambda as they are. "relative" takes sigma in units
        of the median squared distance of the round, alpha and lambda in units of sigma / (K - 1),
        with which no weight is negative up to alpha = 1 whatever the models: the distances of
        networks differ by orders of magnitude, and a sigma that does not fit them stops all
        collaboration.
      guard: what becomes of an alpha that makes weights negative, see `attention`.
      prox: "coupled", lambda / alpha_k as in the paper, with the alpha_k that the guard left
        ("rows": each client's own); "decoupled", lambda itself.
      start: local training starts from "received" (u_i) or from the client's "own" model (w_i).
        The paper leaves it open; where the pull is weak it decides whether clients collaborate.
      initialisation: "shared", or "independent" as in Algorithm 1.
      attention: A; besides the paper's choice the two that it names, see `collaboration`.
      history: record the weights of every round, `collaboration` [K, K].
    Presets of them, and of the numbers:
      "eq5" (default): Eq. 5 with sigma 1 and alpha 1 (relative), so that weights are symmetric,
        the guard has nothing to do and no client's own weight is negative; lambda 0.1 coupled;
        shared initialisation. Departs from Algorithm 1 in the last: the average of networks that
        were drawn apart is no network, and learning starts late.
      "paper": the same with Algorithm 1's independent initialisation.
      "rows": sigma 0.2 and alpha 25 (relative), which the guard "rows" always bounds: own weights
        are then 0, rows are softmaxes of -d / sigma, not symmetric, and neither theorem applies; a
        decoupled pull of 0.1. It tells clients apart more sharply.
      "flgo": the values of that public code (sigma 25, alpha 1e4, a tenth every 30 rounds) in
        Algorithm 1 as it stands (absolute, coupled, independent), with the guard "step".

    With `RunSpec.gradient_gaps` every so many rounds G(W) of Eq. 1 is measured before a round,
    sum_i F_i(w_i) + lambda sum_(i<j) A(||w_i - w_j||^2) over all clients' training data
    (`objective`), and the length of its gradient (`objective_gradient`), which Theorems 1 and 2
    bound; in the relative scale with the sigma and lambda of that round.

    Everybody takes part in the paper. With less participation the server mixes the models that it
    was sent last; models that were never trained count for nothing once others were.
    Scored: "client" (w_i) or "received" (u_i, of the round that ended).
    Traffic: one model each way. State: two models per client. Cost besides training: two products
    of K x P with K, the one for distances shared by devices.
    """

    def compute_scales(hp, distances, is_included):
        """sigma, and the unit of alpha and lambda."""
        if options.scale == "absolute":
            return hp["sigma"], jnp.ones(())
        sigma = jnp.maximum(hp["sigma"] * median_over_pairs(distances, is_included), 1e-12)
        return sigma, sigma / (len(distances) - 1)

    def compute_attention_weights(hp, state: State, models) -> Attention:
        distances, is_included = (
            compute_squared_distances(models, plan),
            _is_included(state.clients),
        )
        sigma, unit = compute_scales(hp, distances, is_included)
        attention_args = {"guard": options.guard, "function": options.attention}
        attention_result = compute_attention(
            distances, _decay_alpha(hp, state.round) * unit, sigma, is_included, **attention_args
        )
        return attention_result._replace(alpha=attention_result.alpha / unit)

    def compute_objective(hp, state: State, cohort: Cohort):
        models = state.clients.variables["params"]
        losses, gradients = measure_client_losses(
            training.task, plan, state.clients.variables, cohort
        )
        distances = compute_squared_distances(models, plan)
        sigma, unit = compute_scales(hp, distances, _is_included(state.clients))
        function, proximal_weight = ATTENTION_FUNCTIONS[options.attention], hp["prox_lambda"] * unit
        off_diagonal = 1 - jnp.eye(len(distances))
        value = (
            losses.sum()
            + proximal_weight * (off_diagonal * function.value(distances, sigma)).sum() / 2
        )
        pair_weights = 2 * proximal_weight * off_diagonal * function.derivative(distances, sigma)
        # sum_j a_ij (w_i - w_j)
        pair_gradients = mix_models(jnp.diag(pair_weights.sum(1)) - pair_weights, models)
        objective_gradient = jax.tree.map(jnp.add, gradients, pair_gradients)
        return {"objective": value, "objective_gradient": optax.tree.norm(objective_gradient)}

    diagnostics = ClientDiagnostics(("objective", "objective_gradient"), compute_objective)
    return _build_attentive_algorithm(training, plan, compute_attention_weights, options)._replace(
        diagnostics=diagnostics
    )


def heurfedamp(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    options: HeurFedAMPOptions = HeurFedAMPOptions(),
) -> Algorithm:
    """FedAMP with weights by Eq. 8: xi_ii = self_weight (default: 1 / K), the rest shared out among
    the others by a softmax of sigma * cos(w_i, w_j), over all weights of the networks.

    scale: "absolute" takes sigma as it is (25 in that public code); "relative" divides it by the
      median of 1 - cos over pairs: the cosines of networks that started alike are all near 1.
    alpha only serves the proximal term here, where that is coupled. All else as `fedamp`. Presets:
      "relative" (default): sigma 5, a decoupled pull of 0.1, shared initialisation.
      "paper": coupled, and Algorithm 1's independent initialisation.
      "flgo": as `fedamp`'s.
    """

    def compute_attention_weights(hp, state: State, models) -> Attention:
        distances = compute_cosine_distances(models, plan)
        is_included, sigma = _is_included(state.clients), hp["sigma"]
        if options.scale == "relative":
            sigma = sigma / jnp.maximum(median_over_pairs(distances, is_included), 1e-12)
        weights = compute_softmax_attention(distances, sigma, hp["self_weight"], is_included)
        return Attention(weights, jnp.full(len(weights), _decay_alpha(hp, state.round)))

    return _build_attentive_algorithm(training, plan, compute_attention_weights, options)


def _build_attentive_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    compute_attention_weights: Callable[..., Attention],
    options: HeurFedAMPOptions,
) -> Algorithm:
    """Algorithm 1 with weights and alpha_k by `compute_attention_weights(hp, state, models)`, of the parameters of all
    networks."""

    def begin(context, state):
        received = get_client_row(context.message.received, context.client.id)
        start_variables = received if options.start == "received" else state.variables
        return begin_local_training(
            training, context.hp, start_variables, state.optimizer, received["params"]
        )

    def adjust_gradient(context, gradient, local, batch):
        params, received = local.variables["params"], local.aux
        return add_proximal_gradient(
            gradient,
            params,
            received,
            take_row(context.message.proximal_weights, context.client.id),
        ), received

    client_algorithm = with_contract_checks(
        ClientAlgorithm(
            make_personal_model_init(training),
            begin,
            make_training_step(training, adjust_gradient),
            make_personal_model_end(training),
        )
    )

    def init(hp, key, variables, num_clients):
        init_args = (hp, key, variables, num_clients, options.initialisation)
        clients = init_personal_models(training, client_algorithm, *init_args)
        server = FedAMPServerState(clients.variables, jnp.eye(num_clients), jnp.zeros(num_clients))
        return State(server, clients, jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        models = state.clients.variables
        weights, alpha = compute_attention_weights(hp, state, models["params"])
        received = mix_models(weights, models)
        proximal_weights = hp["prox_lambda"] / (
            alpha if options.prox == "coupled" else jnp.ones_like(alpha)
        )
        message = FedAMPServerState(received, weights, proximal_weights)
        result = train_cohort(client_algorithm, plan, hp, message, state.clients, key, cohort)
        records = {"collaboration": weights} if options.history else {}
        info = RoundInfo(result.train_loss, compute_rms_change(result), records)
        return State(message, result.states, state.round + 1), info

    def get_received_model(hp, state, k):
        return get_client_row(state.server.received, k)

    def traffic(hp, state):
        size = num_bytes(get_client_row(state.clients.variables, 0))
        return Traffic(size, size)

    return Algorithm(
        init=init,
        round=round_,
        global_model=None,
        with_global_model=None,
        traffic=traffic,
        personal_variables={"client": get_client_model, "received": get_received_model}[
            training.evaluated_model
        ],
        record_shapes=lambda num_clients: (
            {"collaboration": (num_clients, num_clients)} if options.history else {}
        ),
        artifacts=lambda state: {"collaboration": state.server.weights},
    )


def _decay_alpha(hp, rounds_done: jax.Array) -> jax.Array:
    """alpha_k of the round that follows."""
    return hp["alpha"] * hp["alpha_decay"] ** jnp.floor(rounds_done / hp["alpha_every"])


def _is_included(clients: PersonalModelState) -> jax.Array:
    """Whose models count: of those that were trained, or of all as long as nobody's was."""
    is_trained = clients.num_rounds > 0
    return is_trained | ~is_trained.any()


def make_fedamp_hyperparameters(
    options: HeurFedAMPOptions, num_clients: int
) -> FedAMPHyperParameters:
    """The preset's numbers."""
    if options.preset == "flgo":
        return FedAMPHyperParameters(alpha=1e4, sigma=25.0, prox_lambda=1.0, alpha_decay=0.1)
    if options.preset == "rows":
        return FedAMPHyperParameters(alpha=25.0, sigma=0.2)
    return FedAMPHyperParameters()


def make_heurfedamp_hyperparameters(
    options: HeurFedAMPOptions, num_clients: int
) -> FedAMPHyperParameters:
    """The preset's numbers with a sigma for cosines, and a self-weight of 1 / num_clients."""
    sigma = 25.0 if options.preset == "flgo" else 5.0
    hyperparameters = make_fedamp_hyperparameters(options, num_clients)
    return replace(hyperparameters, sigma=sigma, self_weight=1 / num_clients)


FEDAMP = AlgorithmSpec(
    "fedamp",
    fedamp,
    "each client receives its own mixture of similar models (Huang et al., 2021)",
    paper="Huang et al., AAAI 2021, arXiv:2007.03797",
    options=FedAMPOptions,
    hyperparameters=make_fedamp_hyperparameters,
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
    build=heurfedamp,
    description="FedAMP with weights by the models' cosines (Huang et al., 2021)",
    options=HeurFedAMPOptions,
    hyperparameters=make_heurfedamp_hyperparameters,
    color="#E69F00",
    dashes=(0, (4, 1.5)),
)
