"""`Aggregation`, the base class of all robust aggregations of client updates."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.utils.arrays import expand_like
from fedjax_het.utils.kinds import Kind

Tree = Any


class ClientUpdates(NamedTuple):
    """The changes of the model that the clients of a round send.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates
      >>> changes, present = {"w": jnp.ones((3, 2))}, jnp.array([True, True, False])
      >>> ClientUpdates(changes, jnp.array([0.5, 0.5, 0.0]), present).num_present
      Array(2, dtype=int32)
    """

    changes: Tree
    "Changes of the parameters, `[S, ...]` each."
    weights: jax.Array
    "`[S]` float32: weights of the clients in the average, 0 for clients that did not train."
    is_present: jax.Array
    "`[S]` bool: whether the client has trained."

    @property
    def num_present(self) -> jax.Array:
        """Number of clients that have trained, `[]` int32."""
        return self.is_present.sum(dtype=jnp.int32)


@dataclass(frozen=True, kw_only=True)
class Aggregation(Kind):
    """A rule by which the server combines the updates; a value of the setting `aggregation`.

    Example:
      >>> from fedjax_het.aggregation import Aggregation, TrimmedMean
      >>> isinstance(TrimmedMean(fraction=0.2), Aggregation)
      True
    """


@dataclass(frozen=True, kw_only=True)
class UpdateClipping(Aggregation):
    """A rule that scales the update of each client before the updates are combined.

    Example:
      >>> from fedjax_het.aggregation import NormClipping, UpdateClipping
      >>> issubclass(NormClipping, UpdateClipping)
      True
    """

    @abstractmethod
    def compute_factors(self, updates: ClientUpdates) -> jax.Array:
        """Return the factor of each client's update, `[S]` float32."""


@dataclass(frozen=True, kw_only=True)
class RobustAggregation(Aggregation):
    """A rule that replaces the weighted mean of the updates.

    Example:
      >>> from fedjax_het.aggregation import Median, RobustAggregation
      >>> issubclass(Median, RobustAggregation)
      True
    """

    neutral: ClassVar[float | None] = None

    @abstractmethod
    def combine(self, updates: ClientUpdates) -> Tree:
        """Return the combined change of the model.

        Args:
          updates: the updates of a round. With no client present, any finite value may be returned.

        Returns:
          A tree like one client's change, without the leading axis.
        """


def compute_norms(changes: Tree) -> jax.Array:
    """Return the Euclidean norm of each client's change.

    Args:
      changes: trees of arrays, `[S, ...]`.

    Returns:
      Norms, `[S]` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation.base import compute_norms
      >>> compute_norms({"w": jnp.array([[3.0, 4.0]]), "b": jnp.array([[12.0]])}).tolist()
      [13.0]
    """
    squares = [jnp.square(a).reshape(len(a), -1).sum(1) for a in jax.tree.leaves(changes)]
    return jnp.sqrt(sum(squares))


def compute_clip_factors(changes: Tree, max_norm: float | jax.Array) -> jax.Array:
    """Return min(1, max_norm / norm) of each client's change.

    Args:
      changes: trees of arrays, `[S, ...]`.
      max_norm: largest norm.

    Returns:
      Factors, `[S]` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation.base import compute_clip_factors
      >>> compute_clip_factors(jnp.array([[3.0, 4.0], [0.6, 0.8]]), 2.5).tolist()
      [0.5, 1.0]
    """
    return max_norm / jnp.maximum(compute_norms(changes), max_norm)


def compute_squared_distances(changes: Tree) -> jax.Array:
    """Return the squared Euclidean distance of each pair of changes.

    Args:
      changes: trees of arrays, `[S, ...]`.

    Returns:
      Squared distances, `[S, S]` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation.base import compute_squared_distances
      >>> compute_squared_distances({"w": jnp.array([[0.0, 0.0], [3.0, 4.0]])}).tolist()
      [[0.0, 25.0], [25.0, 0.0]]
    """

    def measure_row(row: Tree) -> jax.Array:
        differences = jax.tree.map(jnp.subtract, changes, row)
        return jnp.square(compute_norms(differences))

    # One row at a time: all differences at once would take S copies of the changes.
    return jax.lax.map(measure_row, changes)


def scale_changes(changes: Tree, factors: jax.Array) -> Tree:
    """Return the changes times a factor for each client.

    Args:
      changes: trees of arrays, `[S, ...]`.
      factors: `[S]`.

    Returns:
      A tree like `changes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation.base import scale_changes
      >>> scale_changes(jnp.ones((2, 2)), jnp.array([1.0, 3.0])).tolist()
      [[1.0, 1.0], [3.0, 3.0]]
    """
    return jax.tree.map(lambda a: a * expand_like(factors, a), changes)


def average_changes(changes: Tree, weights: jax.Array) -> Tree:
    """Return the weighted sum of changes; absent clients, whose weight is 0, are not read.

    Args:
      changes: trees of arrays, `[S, ...]`.
      weights: `[S]`, with the sum 1 for an average.

    Returns:
      A tree like one client's change.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation.base import average_changes
      >>> average_changes(jnp.array([[1.0], [3.0]]), jnp.array([0.5, 0.5])).tolist()
      [2.0]
    """

    def sum_leaf(a: jax.Array) -> jax.Array:
        expanded = expand_like(weights, a)
        return jnp.where(expanded != 0, a * expanded, 0).sum(0)

    return jax.tree.map(sum_leaf, changes)
