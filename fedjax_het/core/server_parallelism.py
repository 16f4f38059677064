"""Work at the server that is a sum over samples, shared by the devices of a federation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.core.resumable_loops import WHOLE_LOOPS, LoopRunner
from fedjax_het.nn.batch_axis import BatchAxis, gather_rows, sum_over_shards, take_local_rows

Tree = Any


class ServerParallelism(NamedTuple):
    """The devices that share the server's work, which runs inside a `shard_map`.

    Every device has all arguments and results. It computes its part of the sums in between, which
    the devices then add. The number of devices changes the results by rounding alone.

    Attributes:
      axis: axis of the mesh that the devices are along; None for a single device.
      num_devices: number of devices.
      loops: runs the long loops of the work.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.server_parallelism import ServerParallelism
      >>> ServerParallelism().map_samples(lambda x: 2 * x, jnp.arange(3)).tolist()
      [0, 2, 4]
    """

    axis: str | None = None
    num_devices: int = 1
    loops: LoopRunner = WHOLE_LOOPS

    @property
    def batch_axis(self) -> BatchAxis | None:
        """Return the devices as sharers of a batch, see `nn.batch_axis`; None for one device."""
        return None if self.axis is None else BatchAxis(self.axis, self.num_devices)

    def sum_over_devices(self, sums: Tree) -> Tree:
        """Return the sums of all devices' parts. Cost: one collective."""
        return sum_over_shards(sums, self.batch_axis)

    def map_samples(self, function: Callable[[Tree], jax.Array], samples: Tree) -> jax.Array:
        """Compute an entry for each sample, of which each device computes its part.

        Cost: one collective.

        Args:
          function: `samples -> [n, ...]`, an entry for each sample by itself.
          samples: a tree of arrays with a leading axis n.

        Returns:
          The entries of all samples, `[n, ...]`.
        """
        num_samples = len(jax.tree.leaves(samples)[0])
        entries = function(take_local_rows(samples, self.batch_axis))
        return gather_rows(entries, self.batch_axis)[:num_samples]

    def order_after(self, signal: jax.Array, tree: Tree) -> Tree:
        """Delay a tree until a signal is computed if several devices share the work.

        Args:
          signal: see `order_after`.
          tree: see `order_after`.

        Returns:
          The tree.
        """
        return tree if self.axis is None else order_after(signal, tree)


def order_after(signal: jax.Array, tree: Tree) -> Tree:
    """Delay a tree until a signal is computed.

    This orders collectives that do not depend on each other. Two collectives that are ready at the
    same time can block XLA's CPU devices for ever. A barrier does not help: XLA removes it before
    it decides on the order.

    Args:
      signal: a float that is never -inf.
      tree: a tree of numbers.

    Returns:
      A tree with the same values.
    """
    is_ready = signal != -jnp.inf
    return jax.tree.map(lambda leaf: jnp.where(is_ready, leaf, jnp.zeros_like(leaf)), tree)


SINGLE_DEVICE = ServerParallelism()
