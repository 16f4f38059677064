"""Work at the server that is a sum over samples, shared by the devices of a federation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

Tree = Any


class Sharing(NamedTuple):
    """Which devices share: those along a mesh's `axis`, inside whose `shard_map` the work is done.

    Every device holds all arguments and results and makes its part of the sums in between, which
    are then added up: the numbers depend on how many share by rounding alone.
    """

    axis: str | None = None  # None: a device alone
    parts: int = 1

    def over_samples(self, function: Callable[[Tree], tuple[Tree, Tree]], samples: Tree):
        """`function(samples) -> (sums over samples, an entry for each sample)`, each device taking
        its part of the samples, the leading axis of every leaf of `samples`.

        Where parts are not equal, the last is filled up with samples of zeros, which have to add
        nothing to any sum. One collective.
        """
        if self.axis is None:
            return function(samples)
        number = jax.tree.leaves(samples)[0].shape[0]
        each = -(-number // self.parts)
        own = jax.tree.map(lambda leaf: self._own(leaf, each), samples)
        sums, entries = function(own)
        spread = jax.tree.map(self._among_all, entries)
        flat, unravel = ravel_pytree((sums, spread))
        sums, entries = unravel(jax.lax.psum(flat, self.axis))
        return sums, jax.tree.map(lambda leaf: leaf[:number], entries)

    def _own(self, leaf: jax.Array, each: int) -> jax.Array:
        missing = self.parts * each - leaf.shape[0]
        filled = jnp.pad(leaf, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)])
        return jax.lax.dynamic_slice_in_dim(filled, self._first(each), each)

    def _among_all(self, leaf: jax.Array) -> jax.Array:
        """One device's entries in their place among zeros."""
        each = leaf.shape[0]
        zeros = jnp.zeros((self.parts * each, *leaf.shape[1:]), leaf.dtype)
        return jax.lax.dynamic_update_slice_in_dim(zeros, leaf, self._first(each), 0)

    def _first(self, each: int) -> jax.Array:
        return jax.lax.axis_index(self.axis) * each


ALONE = Sharing()
