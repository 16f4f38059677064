"""Work at the server that is a sum over samples, shared by the devices of a federation."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_het.nn.spread import Spread, own_rows, spread_over

Tree = Any


class Sharing(NamedTuple):
    """Which devices share: those along a mesh's `axis`, inside whose `shard_map` the work is done.

    Every device holds all arguments and results and makes its part of the sums in between, which
    are then added up: the numbers depend on how many share by rounding alone.
    """

    axis: str | None = None  # None: a device alone
    parts: int = 1

    def spread(self) -> AbstractContextManager[None]:
        """What is traced inside sees a device's part of a batch, see `nn.spread`."""
        if self.axis is None:
            return nullcontext()
        return spread_over(Spread(self.axis, self.parts))

    def total(self, sums: Tree) -> Tree:
        """The sums of all devices' parts. One collective."""
        if self.axis is None:
            return sums
        flat, unravel = ravel_pytree(sums)
        return unravel(jax.lax.psum(flat, self.axis))

    def for_each_sample(self, function: Callable[[Tree], jax.Array], samples: Tree) -> jax.Array:
        """`function(samples) -> [n, ...]`, an entry for each sample by itself, of samples with a
        leading axis n, of which each device takes its part. One collective."""
        if self.axis is None:
            return function(samples)
        number = jax.tree.leaves(samples)[0].shape[0]
        with self.spread():
            entries = function(own_rows(samples))
        everyones = jax.lax.all_gather(entries, self.axis)  # [parts, rows, ...]
        return everyones.reshape(-1, *entries.shape[1:])[:number]

    def once_known(self, signal: jax.Array, tree: Tree) -> Tree:
        """`tree`, of numbers, not known before `signal`, a float that is never -inf.

        Orders collectives that do not need each other, see `Plan.once_known`.
        """
        if self.axis is None:
            return tree
        known = signal != -jnp.inf
        return jax.tree.map(lambda leaf: jnp.where(known, leaf, jnp.zeros_like(leaf)), tree)


ALONE = Sharing()
