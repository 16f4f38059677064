"""Robust aggregations: medians, trimmed mean, Krum, and clipping of norms."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.base import (
    Aggregation,
    ClientUpdates,
    RobustAggregation,
    UpdateClipping,
    average_changes,
    compute_clip_factors,
    compute_norms,
    compute_squared_distances,
    scale_changes,
)
from fedjax_het.utils.arrays import expand_like, normalize_weights
from fedjax_het.utils.cohorts import compute_cohort_size
from fedjax_het.utils.config import Bounds, PositiveFloat, PositiveInt

Tree = Any
_Half = Annotated[float, Bounds(0, 0.5, open_high=True)]


@dataclass(frozen=True, kw_only=True)
class NormClipping(UpdateClipping):
    """Scale updates whose norm is above a bound down to the bound (Sun et al., 2019).

        u_i <- u_i min(1, max_norm / ||u_i||)     (arXiv:1911.07963, section 4)

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates, NormClipping
      >>> weights, present = jnp.array([1.0]), jnp.array([True])
      >>> updates = ClientUpdates(jnp.array([[3.0, 4.0]]), weights, present)
      >>> NormClipping(max_norm=1).compute_factors(updates).tolist()
      [0.20000000298023224]
    """

    max_norm: PositiveFloat = 1.0
    "Largest norm of an update."
    name: ClassVar[str] = "norm_clipping"
    description: ClassVar[str] = "updates are scaled down to a largest norm"
    strength: ClassVar[str] = "max_norm"
    neutral: ClassVar[float | None] = math.inf

    def compute_factors(self, updates):
        """Return min(1, max_norm / norm)."""
        return compute_clip_factors(updates.changes, self.max_norm)


@dataclass(frozen=True, kw_only=True)
class Median(RobustAggregation):
    """Coordinate-wise median of the updates (Yin et al., ICML 2018, Definition 1).

    Every client counts once. For an even number of clients it is the mean of the two middle values.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates, Median
      >>> changes, present = jnp.array([[1.0], [2.0], [90.0]]), jnp.ones(3, bool)
      >>> Median().combine(ClientUpdates(changes, jnp.ones(3) / 3, present)).tolist()
      [2.0]
    """

    name: ClassVar[str] = "median"
    description: ClassVar[str] = "coordinate-wise median of the updates"
    strength: ClassVar[str] = ""

    def combine(self, updates):
        """Return the median of the present clients."""
        count = updates.num_present
        ranks = jnp.arange(len(updates.weights))
        is_middle = (ranks >= (count - 1) // 2) & (ranks <= count // 2)
        return _average_sorted(updates, is_middle & (ranks < count))


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(RobustAggregation):
    """Coordinate-wise mean without the largest and smallest values (Yin et al., ICML 2018).

    Of n clients the floor(fraction n) largest and smallest values of each coordinate are left out
    (Definition 2). Every client counts once.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates, TrimmedMean
      >>> changes, present = jnp.array([[1.0], [2.0], [90.0]]), jnp.ones(3, bool)
      >>> rule = TrimmedMean(fraction=0.34)
      >>> rule.combine(ClientUpdates(changes, jnp.ones(3) / 3, present)).tolist()
      [2.0]
    """

    fraction: _Half = 0.2
    "Fraction of the clients that is left out at either end, in [0, 0.5)."
    name: ClassVar[str] = "trimmed_mean"
    description: ClassVar[str] = "coordinate-wise mean without the largest and smallest values"
    strength: ClassVar[str] = "fraction"

    def combine(self, updates):
        """Return the mean of the values in the middle."""
        count = updates.num_present
        num_trimmed = _take_fraction(self.fraction, count)
        ranks = jnp.arange(len(updates.weights))
        return _average_sorted(updates, (ranks >= num_trimmed) & (ranks < count - num_trimmed))

    def list_warnings(self, run):
        """Return a warning if no value is left out."""
        count = compute_cohort_size(run.num_clients, run.participation)
        if int(_take_fraction(self.fraction, count)):
            return []
        setting = f"trimmed_mean:fraction={self.fraction:g}"
        return [f"aggregation {setting} is the mean: it leaves out none of {count} updates"]


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(RobustAggregation):
    """Geometric median by smoothed Weiszfeld steps (Pillutla et al., IEEE TSP 2022, Algorithm 2).

        beta_i = p_i / max(smoothing, ||v - u_i||),   v <- sum_i beta_i u_i / sum_i beta_i

    v starts at the weighted mean of the updates u_i; p_i are the weights of the average.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates, GeometricMedian
      >>> changes, present = jnp.array([[1.0], [1.0], [90.0]]), jnp.ones(3, bool)
      >>> result = GeometricMedian().combine(ClientUpdates(changes, jnp.ones(3) / 3, present))
      >>> round(float(result[0]), 4)
      1.0
    """

    iterations: PositiveInt = 16
    "Number of steps; every step reads all updates once."
    smoothing: PositiveFloat = 1e-6
    "Smallest distance that divides a weight."
    name: ClassVar[str] = "geometric_median"
    description: ClassVar[str] = "geometric median of the updates, by Weiszfeld steps"
    strength: ClassVar[str] = "iterations"

    def combine(self, updates):
        """Run the steps."""

        def step(_, center):
            differences = jax.tree.map(jnp.subtract, updates.changes, center)
            distances = jnp.maximum(compute_norms(differences), self.smoothing)
            weights = normalize_weights(updates.weights / distances)
            return average_changes(updates.changes, weights)

        start = average_changes(updates.changes, updates.weights)
        return jax.lax.fori_loop(0, self.iterations, step, start)


@dataclass(frozen=True, kw_only=True)
class Krum(RobustAggregation):
    """The update that is closest to its neighbors, or the mean of several (Blanchard et al., 2017).

    With n clients, of which f = floor(fraction n) are assumed to be malicious, the score of a
    client is the sum of the squared distances to its n - f - 2 closest neighbors (at least one).
    The result is the mean of the `selected` updates with the lowest scores (Multi-Krum for more
    than one).

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates, Krum
      >>> changes, present = jnp.array([[1.0], [1.1], [90.0], [1.3]]), jnp.ones(4, bool)
      >>> rule = Krum(fraction=0.25)
      >>> round(float(rule.combine(ClientUpdates(changes, jnp.ones(4) / 4, present))[0]), 4)
      1.0
    """

    fraction: _Half = 0.2
    "Fraction of the clients that is assumed to be malicious, in [0, 0.5)."
    selected: PositiveInt = 1
    "Number of updates that are averaged, at most the number of clients of the round."
    name: ClassVar[str] = "krum"
    description: ClassVar[str] = "the updates closest to their neighbors (Krum, Multi-Krum)"
    strength: ClassVar[str] = "fraction"

    def combine(self, updates):
        """Select the updates by their scores."""
        count = updates.num_present
        num_malicious = _take_fraction(self.fraction, count)
        num_neighbors = jnp.maximum(count - num_malicious - 2, 1)
        is_pair = updates.is_present[:, None] & updates.is_present
        is_pair &= ~jnp.eye(len(is_pair), dtype=bool)
        distances = jnp.where(is_pair, compute_squared_distances(updates.changes), jnp.inf)
        closest = jnp.sort(distances, 1)
        is_counted = (jnp.arange(len(closest)) < num_neighbors) & jnp.isfinite(closest)
        scores = jnp.where(is_counted, closest, 0).sum(1)
        scores = jnp.where(updates.is_present, scores, jnp.inf)
        order = jnp.argsort(scores)
        num_selected = jnp.minimum(self.selected, count)
        weights = jnp.zeros(len(scores)).at[order].set(jnp.arange(len(scores)) < num_selected)
        return average_changes(updates.changes, weights / jnp.maximum(num_selected, 1))

    def list_warnings(self, run):
        """Return warnings if all updates are averaged, or if there are few for the assumption."""
        warnings, count = [], compute_cohort_size(run.num_clients, run.participation)
        if self.selected >= count:
            warnings.append(
                f"aggregation krum:selected={self.selected} averages all {count} updates"
            )
        num_malicious = int(_take_fraction(self.fraction, count))
        if count <= 2 * num_malicious + 2:
            setting = f"krum:fraction={self.fraction:g}"
            warnings.append(
                f"aggregation {setting} assumes {num_malicious} malicious of {count} updates: Krum's "
                f"guarantee needs more than {2 * num_malicious + 2}"
            )
        return warnings


@dataclass(frozen=True, kw_only=True)
class CenteredClipping(RobustAggregation):
    """Mean of updates that are clipped around a center (Karimireddy et al., ICML 2021, section 4).

        v <- v + 1/n sum_i (u_i - v) min(1, radius / ||u_i - v||)

    v starts at 0. The authors' start is the previous aggregate of momenta, which clients here do
    not send. Every client counts once.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import CenteredClipping, ClientUpdates
      >>> changes, present = jnp.array([[1.0], [-1.0], [90.0]]), jnp.ones(3, bool)
      >>> rule = CenteredClipping(radius=3.0, iterations=1)
      >>> rule.combine(ClientUpdates(changes, jnp.ones(3) / 3, present)).tolist()
      [1.0]
    """

    radius: PositiveFloat = 1.0
    "Largest distance from the center at which an update counts in full, tau."
    iterations: PositiveInt = 3
    "Number of steps; every step reads all updates once."
    name: ClassVar[str] = "centered_clipping"
    description: ClassVar[str] = "mean of updates that are clipped around a center"
    strength: ClassVar[str] = "radius"

    def combine(self, updates):
        """Run the steps."""
        weights = updates.is_present / jnp.maximum(updates.num_present, 1)

        def step(_, center):
            differences = jax.tree.map(jnp.subtract, updates.changes, center)
            factors = self.radius / jnp.maximum(compute_norms(differences), self.radius)
            moved = average_changes(scale_changes(differences, factors), weights)
            return jax.tree.map(jnp.add, center, moved)

        start = jax.tree.map(lambda a: jnp.zeros_like(a[0]), updates.changes)
        return jax.lax.fori_loop(0, self.iterations, step, start)


@dataclass(frozen=True, kw_only=True)
class Bucketing(Aggregation):
    """Average random groups of updates before another rule (Karimireddy, He and Jaggi, ICLR 2022).

    The present clients are divided at random into buckets of `size` (Algorithm 1); the following
    rule combines the buckets' averages. Averages of heterogeneous clients differ less than the
    clients themselves.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import Bucketing, ClientUpdates
      >>> updates = ClientUpdates(jnp.arange(4.0)[:, None], jnp.ones(4) / 4, jnp.ones(4, bool))
      >>> Bucketing(size=2).group(updates, jax.random.key(0)).changes.shape
      (2, 1)
    """

    size: PositiveInt = 2
    "Number of clients of a bucket; the last bucket may have fewer."
    name: ClassVar[str] = "bucketing"
    description: ClassVar[str] = "random groups of clients are averaged before the next rule"
    strength: ClassVar[str] = "size"
    neutral: ClassVar[float | None] = 1

    def list_warnings(self, run):
        """Return a warning if one bucket has all updates."""
        count = compute_cohort_size(run.num_clients, run.participation)
        if self.size < count:
            return []
        return [
            f"aggregation bucketing:size={self.size} is the mean: one bucket of {count} updates"
        ]

    def group(self, updates: ClientUpdates, key: jax.Array) -> ClientUpdates:
        """Return the averages of the buckets.

        Args:
          updates: the updates of the clients.
          key: PRNG key of the division.

        Returns:
          The averages with equal weights inside a bucket, and the summed weights.
        """
        num_clients = len(updates.weights)
        num_buckets = -(-num_clients // self.size)
        # Absent clients come last, so that the present clients fill the first buckets.
        draws = jax.random.uniform(key, (num_clients,)) + ~updates.is_present
        bucket = (
            jnp.zeros(num_clients, jnp.int32)
            .at[jnp.argsort(draws)]
            .set(jnp.arange(num_clients) // self.size)
        )
        members = (bucket == jnp.arange(num_buckets)[:, None]) & updates.is_present
        counts = members.sum(1)
        shares = members / jnp.maximum(counts, 1)[:, None]
        changes = jax.vmap(lambda share: average_changes(updates.changes, share))(shares)
        return ClientUpdates(changes, (members * updates.weights).sum(1), counts > 0)


def _take_fraction(fraction: float, count: jax.Array | int) -> jax.Array:
    """Return floor(fraction * count), int32; a product that rounding lowers is not rounded down."""
    return jnp.floor(jnp.float32(fraction) * count + 1e-4).astype(jnp.int32)


def _average_sorted(updates: ClientUpdates, is_used: jax.Array) -> Tree:
    """Return the mean of each coordinate's values at some ranks among the present clients."""
    count = jnp.maximum(is_used.sum(), 1)

    def average(a: jax.Array) -> jax.Array:
        ordered = jnp.sort(jnp.where(expand_like(updates.is_present, a), a, jnp.inf), 0)
        return jnp.where(expand_like(is_used, a), ordered, 0).sum(0) / count

    return jax.tree.map(average, updates.changes)
