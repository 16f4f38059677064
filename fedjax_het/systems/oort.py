"""Oort's client selection: clients with useful data and fast devices."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from fedjax_het.systems.selection import AdaptiveSelection
from fedjax_het.utils.config import (
    Bounds,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UnitInterval,
)

_MAX_BLACKLIST_SHARE = 0.3  # of all clients, as in the public code
_MIN_SECONDS = 1e-300  # of durations that are 0
_MIN_SCORE = 1e-12  # of losses that are negative


class OortState(NamedTuple):
    """The server's knowledge of the clients."""

    sizes: np.ndarray
    "Training examples of each client, int64 `[K]`."
    utilities: np.ndarray
    "Statistical utility of each client when it last took part, float64 `[K]`; NaN before."
    last_rounds: np.ndarray
    "Round in which each client last took part, from 1, int64 `[K]`; 0 before."
    counts: np.ndarray
    "Rounds in which each client took part, int64 `[K]`."
    exploited: np.ndarray
    "Clients that the last round selected by utility, int64 `[n]`."
    history: tuple[float, ...]
    "Mean utility of the clients that each round selected by utility."
    exploration: float
    "Share of new clients in the last round, epsilon."
    percentile: float
    "Percentile of the clients' durations that is the preferred duration of a round."


@dataclass(frozen=True, kw_only=True)
class Oort(AdaptiveSelection):
    """Clients with useful data and fast devices (Lai et al., OSDI 2021, arXiv:2010.06081).

    The statistical utility of a client is U_i = |B_i| sqrt(mean of loss^2) (Section 4.2). Utilities
    are clipped at a percentile (Section 4.4), and scaled to [0, 1] as in the public code. The score
    in round R is (Equation 1 and Algorithm 1)

        (U_i + sqrt(0.1 log R / L_i)) * ((T / t_i)^alpha if T < t_i else 1),

    with the last round L_i of the client, its duration t_i and the preferred duration T. The server
    draws (1 - epsilon) S clients in proportion to the scores. It draws them among the clients with
    at least `cutoff` times the score of the best client of rank (1 - epsilon) S. The other clients
    take part for the first time. Epsilon decays from `exploration` to `min_exploration`.

    Defaults of the paper: `alpha`, `exploration`, `decay`, `min_exploration` and `pacer_rounds`
    (Section 7.1), `cutoff` and `clip` (Section 4.4). FedScale (`thirdparty/oort/oort.py`,
    `config_parser.py`) has a smallest epsilon of 0.3, a clip of 0.9 and a cut-off of 0.05. It sets
    the other defaults: `preferred`, `pacer_step` and `window`.

    The pacer and the draw of new clients follow FedScale. T is a percentile of the clients'
    durations. The pacer raises it if the utility of `pacer_rounds`
    rounds differs by at most 10 % from the rounds before, and lowers it after a change by a factor
    of 5. New clients are drawn in proportion to their size with the same penalty, among the best
    `window` times their number.

    Departures: Algorithm 1 raises T by a constant if the utility falls, and draws new clients by
    speed alone. The run records the mean loss of each client, and the root of the mean square is
    replaced by it. Utilities are scaled over the clients that took part; FedScale includes the
    sizes of new clients. Durations are known before the first participation. A cohort that lacks
    new clients is filled with other clients. By default there is no blacklist, as in FedScale; the
    paper removes clients after a number of rounds.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.systems import Oort
      >>> list(RunSpec(system=[Oort()]).system)
      ['oort.alpha']
    """

    alpha: NonNegativeFloat = 2.0
    "Exponent of the penalty of slow clients."
    exploration: UnitInterval = 0.9
    "Share of new clients before the first round."
    decay: UnitInterval = 0.98
    "Factor of the share of new clients in each round."
    min_exploration: UnitInterval = 0.2
    "Smallest share of new clients."
    cutoff: UnitInterval = 0.95
    "Share of the cut-off utility that a client must reach, c."
    clip: UnitInterval = 0.95
    "Quantile at which utilities are clipped."
    blacklist_rounds: NonNegativeInt = 0
    "Rounds after which a client takes no more part; 0: no limit."
    preferred: Annotated[float, Bounds(0, 100)] = 30.0
    "Percentile of durations that is the preferred duration of the first rounds."
    pacer_step: Annotated[float, Bounds(0, 100)] = 5.0
    "Change of the percentile by the pacer."
    pacer_rounds: PositiveInt = 20
    "Rounds between changes of the preferred duration."
    window: Annotated[float, Bounds(1, 1e6)] = 5.0
    "Number of new candidates per new client."
    name: ClassVar[str] = "oort"
    description: ClassVar[str] = "clients with useful data and fast devices"
    strength: ClassVar[str] = "alpha"

    def list_warnings(self, run):
        """Return a warning if all clients take part in every round."""
        return [] if self.blacklist_rounds else self._warn_if_all_take_part(run)

    def start(self, federation):
        """Return the state without any participation."""
        num_clients = federation.num_clients
        return OortState(
            sizes=federation.sizes,
            utilities=np.full(num_clients, np.nan),
            last_rounds=np.zeros(num_clients, np.int64),
            counts=np.zeros(num_clients, np.int64),
            exploited=np.zeros(0, np.int64),
            history=(),
            exploration=self.exploration,
            percentile=self.preferred,
        )

    def select_by_losses(self, state, federation, available, count, *, durations, round_index):
        """Draw known clients by utility, and new clients by size and speed."""
        state = self._set_pace(state)
        exploration = max(state.exploration * self.decay, self.min_exploration)
        log_factors = self._penalize_slow(state, durations)
        available = available[federation.sizes[available] > 0]
        is_new = state.last_rounds[available] == 0
        new, known = available[is_new], available[~is_new]
        known = known[~np.isin(known, self._find_blacklist(state))]
        num_new = min(len(new), max(int(count * exploration), count - len(known)))
        num_known = min(count - num_new, len(known))
        rng = self.make_rng(federation.seed, round_index)
        exploited = np.zeros(0, np.int64)
        if num_known:
            # Logarithms, because the penalties of large exponents are below the range of floats.
            scores = np.log(self._compute_scores(state, known, round_index + 1))
            scores += log_factors[known]
            is_admitted = np.ones(len(known), bool)
            if self.cutoff:
                is_admitted = scores >= math.log(self.cutoff) + np.sort(scores)[-num_known]
            exploited = _draw(rng, known[is_admitted], scores[is_admitted], num_known)
        rewards = np.log(federation.sizes[new]) + log_factors[new]
        best = np.argsort(-rewards, kind="stable")[: int(self.window * num_new)]
        explored = _draw(rng, new[best], rewards[best], num_new)
        state = state._replace(exploited=exploited, exploration=exploration)
        return np.concatenate([explored, exploited]), state

    def record_losses(self, state, losses):
        """Record the utilities and the round of the clients that took part."""
        has_reported = np.isfinite(losses)
        utilities = np.where(has_reported, state.sizes * losses.astype(np.float64), state.utilities)
        exploited = state.exploited[has_reported[state.exploited]]
        mean = float(utilities[exploited].mean()) if len(exploited) else 0.0
        history = (*state.history, mean)
        return state._replace(
            utilities=utilities,
            last_rounds=np.where(has_reported, len(history), state.last_rounds),
            counts=state.counts + has_reported,
            history=history,
        )

    def _set_pace(self, state: OortState) -> OortState:
        """Return the state with the percentile of durations that the pacer sets."""
        rounds, history = self.pacer_rounds, state.history
        if len(history) < 2 * rounds or len(history) % rounds:
            return state
        before, latest = sum(history[-2 * rounds : -rounds]), sum(history[-rounds:])
        percentile, change = state.percentile, abs(latest - before)
        if change <= 0.1 * before:
            percentile = min(100.0, percentile + self.pacer_step)
        elif change >= 5 * before:
            percentile = max(self.pacer_step, percentile - self.pacer_step)
        return state._replace(percentile=percentile)

    def _penalize_slow(self, state: OortState, durations: np.ndarray) -> np.ndarray:
        """Return the logarithms of the factors for the clients' durations, float64 `[K]`.

        Durations are NaN, and the factors 1, for clients that a drift makes absent.
        """
        ascending = np.sort(durations[(state.sizes > 0) & np.isfinite(durations)])
        if state.percentile >= 100 or not len(ascending):
            return np.zeros(len(durations))
        rank = min(int(len(ascending) * state.percentile / 100), len(ascending) - 1)
        log_durations = np.log(np.maximum(np.nan_to_num(durations), _MIN_SECONDS))
        log_preferred = np.log(np.maximum(ascending[rank], _MIN_SECONDS))
        return self.alpha * np.minimum(log_preferred - log_durations, 0.0)

    def _find_blacklist(self, state: OortState) -> np.ndarray:
        """Return the clients that take no more part, the most frequent ones first."""
        if not self.blacklist_rounds:
            return np.zeros(0, np.int64)
        by_count = np.argsort(-state.counts, kind="stable")
        is_frequent = state.counts[by_count] > self.blacklist_rounds
        return by_count[is_frequent][: int(_MAX_BLACKLIST_SHARE * len(state.counts))]

    def _compute_scores(self, state: OortState, known: np.ndarray, number: int) -> np.ndarray:
        """Return the scores of clients in round `number`, from 1, without the penalty."""
        utilities = state.utilities[known]
        ascending = np.sort(utilities)
        limit = ascending[min(int(len(ascending) * self.clip), len(ascending) - 1)]
        lowest = 0.999 * ascending[0]
        scaled = (np.minimum(utilities, limit) - lowest) / max(ascending[-1] - lowest, 1e-4)
        scores = scaled + np.sqrt(0.1 * np.log(number) / state.last_rounds[known])
        return np.maximum(scores, _MIN_SCORE)


def _draw(
    rng: np.random.Generator, clients: np.ndarray, log_weights: np.ndarray, count: int
) -> np.ndarray:
    """Draw clients without replacement, in proportion to `exp(log_weights)`."""
    if not count:
        return clients[:0]
    weights = np.exp(log_weights - log_weights.max())
    if np.count_nonzero(weights) < count:
        # Too many weights are below the range of floats. The largest sums of logarithms and Gumbel
        # noise have the distribution of the draw (Efraimidis and Spirakis, 2006).
        return clients[np.argsort(-(log_weights + rng.gumbel(size=len(clients))))[:count]]
    return rng.choice(clients, count, replace=False, p=weights / weights.sum())
