"""Work at the server that is a sum over samples, shared by the devices of a federation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.core.resumable_loops import WHOLE_LOOPS, LoopRunner
from fedjax_het.nn.batch_axis import (
    BatchAxis,
    gather_rows,
    sum_over_shards,
    take_local_rows,
)

Tree = Any


class ServerParallelism(NamedTuple):
    """Which devices share: those along a mesh's `axis`, inside whose `shard_map` the work is done.

    Every device holds all arguments and results and makes its part of the sums in between, which
    are then added up: the numbers depend on how many share by rounding alone.
    """

    axis: str | None = None  # None: a device alone
    num_devices: int = 1
    loops: LoopRunner = WHOLE_LOOPS  # runs the long loops of the work

    @property
    def batch_axis(self) -> BatchAxis | None:
        """The devices as those that share a batch, see `nn.batch_axis`; None for one device."""
        return None if self.axis is None else BatchAxis(self.axis, self.num_devices)

    def sum_over_devices(self, sums: Tree) -> Tree:
        """The sums of all devices' parts. One collective."""
        return sum_over_shards(sums, self.batch_axis)

    def map_samples(self, function: Callable[[Tree], jax.Array], samples: Tree) -> jax.Array:
        """`function(samples) -> [n, ...]`, an entry for each sample by itself, of samples with a
        leading axis n, of which each device takes its part. One collective."""
        num_samples = len(jax.tree.leaves(samples)[0])
        entries = function(take_local_rows(samples, self.batch_axis))
        return gather_rows(entries, self.batch_axis)[:num_samples]

    def order_after(self, signal: jax.Array, tree: Tree) -> Tree:
        """See `order_after`."""
        return tree if self.axis is None else order_after(signal, tree)


def order_after(signal: jax.Array, tree: Tree) -> Tree:
    """`tree`, of numbers, which is not known before `signal`, a float that is never -inf.

    Orders collectives that do not need each other: two that are ready at the same time can hang
    XLA's CPU devices, see `device_exchange.exchange_between_devices`. A barrier would not do: XLA removes it before it
    decides what runs when.
    """
    is_ready = signal != -jnp.inf
    return jax.tree.map(lambda leaf: jnp.where(is_ready, leaf, jnp.zeros_like(leaf)), tree)


SINGLE_DEVICE = ServerParallelism()
