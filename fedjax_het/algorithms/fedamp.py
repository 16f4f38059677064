"""FedAMP and HeurFedAMP (Huang et al., AAAI 2021, arXiv:2007.03797)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.building import num_bytes
from fedjax_het.algorithms.collaboration import (
    ATTENTION_FUNCTIONS,
    Attention,
    Guard,
    attention,
    cosine_distances,
    median_pair,
    pass_messages,
    softmax_attention,
    squared_distances,
)
from fedjax_het.algorithms.contract import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.entry import Entry
from fedjax_het.algorithms.separate import (
    Initialisation,
    OwnModel,
    clients_own,
    keep_own,
    own_model,
    own_models,
    rms_change,
)
from fedjax_het.common.arrays import row_of
from fedjax_het.common.records import NonNegative, Positive, Record, Share
from fedjax_het.engine.contract import ClientMethod, checked_client
from fedjax_het.engine.gradient_gaps import Survey, own_losses
from fedjax_het.engine.lanes import Cohort, client_row, train_cohort
from fedjax_het.engine.local import LocalTraining, begin_training, pulled, training_step
from fedjax_het.engine.plan import Plan

Tree = Any

_PAPER = {"initialisation": "independent", "prox": "coupled"}
_FLGO = {**_PAPER, "scale": "absolute"}


@dataclass(frozen=True)
class HeurFedAMPOptions(Record):
    """See `fedamp` for what each is."""

    PRESETS = {"relative": {}, "paper": _PAPER, "flgo": _FLGO}  # noqa: RUF012

    preset: str = "relative"
    scale: Literal["relative", "absolute"] = "relative"
    "Units of sigma, alpha and lambda: the distances between the round's models, or none."
    initialisation: Initialisation = "shared"
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
    guard: Guard = "step"
    "What becomes of an alpha that makes weights negative."
    attention: Literal["exponential", "scad", "mcp"] = "exponential"
    "The function A of squared distances."


@dataclass(frozen=True)
class FedAMPNumbers(Record):
    alpha: Positive = 1.0
    "Step along the pair terms, in round 0."
    sigma: Positive = 1.0
    "Width of the attention; of HeurFedAMP how sharply it tells cosines apart."
    prox_lambda: NonNegative = 0.1
    "Of the pull towards the mixture."
    alpha_decay: Positive = 1.0
    "What alpha is multiplied by, every `alpha_every` rounds."
    alpha_every: Positive = 30.0
    "Rounds between."
    self_weight: Share | None = None
    "HeurFedAMP's alone."


class Messages(NamedTuple):
    """What the server made of the clients' models for their round.

    received [K, ...]: u_i. weights [K, K]: xi. pull: [K] the coefficients of the proximal gradient.
    """

    received: Tree
    weights: jax.Array
    pull: jax.Array


def fedamp(
    training: LocalTraining, plan: Plan, *, options: FedAMPOptions = FedAMPOptions()
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

    def scales(hp, distances, heard):
        """sigma, and the unit of alpha and lambda."""
        if options.scale == "absolute":
            return hp["sigma"], jnp.ones(())
        sigma = jnp.maximum(hp["sigma"] * median_pair(distances, heard), 1e-12)
        return sigma, sigma / (len(distances) - 1)

    def attend(hp, state: State, models) -> Attention:
        distances, heard = squared_distances(models, plan), _heard(state.clients)
        sigma, unit = scales(hp, distances, heard)
        how = {"guard": options.guard, "function": options.attention}
        found = attention(distances, _decayed(hp, state.round) * unit, sigma, heard, **how)
        return found._replace(alpha=found.alpha / unit)

    def objective(hp, state: State, cohort: Cohort):
        models = state.clients.variables["params"]
        losses, gradients = own_losses(training.task, plan, state.clients.variables, cohort)
        distances = squared_distances(models, plan)
        sigma, unit = scales(hp, distances, _heard(state.clients))
        function, strength = ATTENTION_FUNCTIONS[options.attention], hp["prox_lambda"] * unit
        apart = 1 - jnp.eye(len(distances))
        value = losses.sum() + strength * (apart * function.value(distances, sigma)).sum() / 2
        pulls = 2 * strength * apart * function.slope(distances, sigma)
        # sum_j a_ij (w_i - w_j)
        towards = pass_messages(jnp.diag(pulls.sum(1)) - pulls, models)
        whole = jax.tree.map(jnp.add, gradients, towards)
        return {"objective": value, "objective_gradient": optax.tree.norm(whole)}

    survey = Survey(("objective", "objective_gradient"), objective)
    return _attentive(training, plan, attend, options)._replace(survey=survey)


def heurfedamp(
    training: LocalTraining, plan: Plan, *, options: HeurFedAMPOptions = HeurFedAMPOptions()
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

    def attend(hp, state: State, models) -> Attention:
        distances = cosine_distances(models, plan)
        heard, sigma = _heard(state.clients), hp["sigma"]
        if options.scale == "relative":
            sigma = sigma / jnp.maximum(median_pair(distances, heard), 1e-12)
        weights = softmax_attention(distances, sigma, hp["self_weight"], heard)
        return Attention(weights, jnp.full(len(weights), _decayed(hp, state.round)))

    return _attentive(training, plan, attend, options)


def _attentive(
    training: LocalTraining,
    plan: Plan,
    attend: Callable[..., Attention],
    options: HeurFedAMPOptions,
) -> Algorithm:
    """Algorithm 1 with weights and alpha_k by `attend(hp, state, models)`, of the parameters of all
    networks."""

    def begin(hp, messages, state, client):
        received = client_row(messages.received, client.id)
        first = received if options.start == "received" else state.variables
        return begin_training(training, hp, first, state.optimizer, received["params"])

    def pull(hp, gradient, local, messages, batch, client):
        here, received = local.variables["params"], local.memory
        return pulled(gradient, here, received, row_of(messages.pull, client.id)), received

    client = checked_client(
        ClientMethod(own_model(training), begin, training_step(training, pull), keep_own(training))
    )

    def init(hp, key, variables, num_clients):
        given = (hp, key, variables, num_clients, options.initialisation)
        clients = own_models(training, client, *given)
        server = Messages(clients.variables, jnp.eye(num_clients), jnp.zeros(num_clients))
        return State(server, clients, jnp.int32(0))

    def round_(hp, state, key, cohort: Cohort):
        models = state.clients.variables
        weights, alpha = attend(hp, state, models["params"])
        received = pass_messages(weights, models)
        strength = hp["prox_lambda"] / (
            alpha if options.prox == "coupled" else jnp.ones_like(alpha)
        )
        messages = Messages(received, weights, strength)
        result = train_cohort(client, plan, hp, messages, state.clients, key, cohort)
        records = {"collaboration": weights} if options.history else {}
        info = RoundInfo(result.train_loss, rms_change(result), records)
        return State(messages, result.states, state.round + 1), info

    def received(hp, state, k):
        return client_row(state.server.received, k)

    def traffic(hp, state):
        size = num_bytes(client_row(state.clients.variables, 0))
        return Traffic(size, size)

    return Algorithm(
        init=init,
        round=round_,
        global_model=None,
        with_global_model=None,
        traffic=traffic,
        personal={"client": clients_own, "received": received}[training.scored],
        records=lambda num_clients: (
            {"collaboration": (num_clients, num_clients)} if options.history else {}
        ),
        artifacts=lambda state: {"collaboration": state.server.weights},
    )


def _decayed(hp, rounds_done: jax.Array) -> jax.Array:
    """alpha_k of the round that follows."""
    return hp["alpha"] * hp["alpha_decay"] ** jnp.floor(rounds_done / hp["alpha_every"])


def _heard(clients: OwnModel) -> jax.Array:
    """Whose models count: of those that were trained, or of all as long as nobody's was."""
    trained = clients.rounds > 0
    return trained | ~trained.any()


def fedamp_numbers(options: HeurFedAMPOptions, num_clients: int) -> FedAMPNumbers:
    """The preset's numbers."""
    if options.preset == "flgo":
        return FedAMPNumbers(alpha=1e4, sigma=25.0, prox_lambda=1.0, alpha_decay=0.1)
    if options.preset == "rows":
        return FedAMPNumbers(alpha=25.0, sigma=0.2)
    return FedAMPNumbers()


def heurfedamp_numbers(options: HeurFedAMPOptions, num_clients: int) -> FedAMPNumbers:
    """The preset's numbers with a sigma for cosines, and a self-weight of 1 / num_clients."""
    sigma = 25.0 if options.preset == "flgo" else 5.0
    numbers = fedamp_numbers(options, num_clients)
    return replace(numbers, sigma=sigma, self_weight=1 / num_clients)


FEDAMP = Entry(
    "fedamp",
    fedamp,
    "each client receives its own mixture of similar models (Huang et al., 2021)",
    paper="Huang et al., AAAI 2021, arXiv:2007.03797",
    options=FedAMPOptions,
    numbers=fedamp_numbers,
    protocol="fedamp",
    colour="#56B4E9",
    scored=("client", "received"),
    global_model=False,
    surveys=True,
    min_clients=2,
)
HEURFEDAMP = replace(
    FEDAMP,
    surveys=False,
    name="heurfedamp",
    build=heurfedamp,
    description="FedAMP with weights by the models' cosines (Huang et al., 2021)",
    options=HeurFedAMPOptions,
    numbers=heurfedamp_numbers,
    colour="#E69F00",
    dashes=(0, (4, 1.5)),
)
