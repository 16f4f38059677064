"""Work at the server that is a sum over samples, shared by the devices of a federation."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.nn.spread import Spread, over_whole_batch, own_rows, spread_over, whole_rows

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
        return spread_over(None if self.axis is None else Spread(self.axis, self.parts))

    def total(self, sums: Tree) -> Tree:
        """The sums of all devices' parts. One collective."""
        with self.spread():
            return over_whole_batch(sums)

    def for_each_sample(self, function: Callable[[Tree], jax.Array], samples: Tree) -> jax.Array:
        """`function(samples) -> [n, ...]`, an entry for each sample by itself, of samples with a
        leading axis n, of which each device takes its part. One collective."""
        number = len(jax.tree.leaves(samples)[0])
        with self.spread():
            return whole_rows(function(own_rows(samples)))[:number]

    def once_known(self, signal: jax.Array, tree: Tree) -> Tree:
        """See `once_known`."""
        return tree if self.axis is None else once_known(signal, tree)


def once_known(signal: jax.Array, tree: Tree) -> Tree:
    """`tree`, of numbers, which is not known before `signal`, a float that is never -inf.

    Orders collectives that do not need each other: two that are ready at the same time can hang
    XLA's CPU devices, see `lanes._exchange`. A barrier would not do: XLA removes it before it
    decides what runs when.
    """
    known = signal != -jnp.inf
    return jax.tree.map(lambda leaf: jnp.where(known, leaf, jnp.zeros_like(leaf)), tree)


ALONE = Sharing()
