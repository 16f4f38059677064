"""A batch that several devices share, each of which holds a part of the samples.

Values of each sample by itself do not depend on the other devices. Values of the whole batch do.
Batch norm's statistics are sums over all parts. A mask or an augmentation that is drawn for the
whole batch has a row for each of its samples. Functions and layers that compute such values take
the `BatchAxis` of the batch as an argument; None stands for a batch that one device holds whole.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_het.utils.arrays import pad_rows

Tree = Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class BatchAxis:
    """The devices that share a batch.

    Attributes:
      name: the axis of the mesh that the devices are along.
      num_shards: number of devices, and of parts of the batch.
    """

    name: str
    num_shards: int


def make_axis_argument(batch_axis: BatchAxis | None) -> dict[str, BatchAxis]:
    """Return `batch_axis` as a keyword argument, or no argument for a whole batch.

    Functions that never see a part of a batch need not have the argument.

    Args:
      batch_axis: the devices that share the batch; None: the batch is whole.

    Returns:
      Keyword arguments.
    """
    return {} if batch_axis is None else {"batch_axis": batch_axis}


def get_num_shards(batch_axis: BatchAxis | None) -> int:
    """Return the number of parts of the batch.

    Args:
      batch_axis: the devices that share the batch; None: the batch is whole.

    Returns:
      Number of parts; 1 if the batch is whole.
    """
    return 1 if batch_axis is None else batch_axis.num_shards


def get_global_row_indices(num_rows: int, batch_axis: BatchAxis | None) -> jax.Array:
    """Return the positions of the local samples in the whole batch.

    Args:
      num_rows: number of local samples, n.
      batch_axis: the devices that share the batch; None for a whole batch.

    Returns:
      Positions, int32 `[n]`.
    """
    first = 0 if batch_axis is None else jax.lax.axis_index(batch_axis.name) * num_rows
    return first + jnp.arange(num_rows)


def sum_over_shards(sums: Tree, batch_axis: BatchAxis | None) -> Tree:
    """Add sums over each device's samples to sums over the whole batch.

    Cost: one collective if devices share the batch. If the result is differentiated, each device's
    loss must be the loss of its own samples, and the devices' gradients must be added.

    Args:
      sums: tree of arrays, sums over this device's samples.
      batch_axis: the devices that share the batch; None: the batch is whole.

    Returns:
      Tree like `sums`, sums over the whole batch.
    """
    if batch_axis is None:
        return sums
    flat, unravel = ravel_pytree(sums)
    return unravel(jax.lax.psum(flat, batch_axis.name))


def gather_rows(rows: jax.Array, batch_axis: BatchAxis | None) -> jax.Array:
    """Gather the rows of the whole batch from all devices.

    Cost: one collective if devices share the batch. If the result is differentiated, each device's
    loss must be the loss of its own samples, and the devices' gradients must be added.

    Args:
      rows: `[n, ...]`, a row for each of this device's samples; all parts must be full.
      batch_axis: the devices that share the batch; None: the batch is whole.

    Returns:
      `[num_shards * n, ...]`, a row for each sample of the whole batch.
    """
    if batch_axis is None:
        return rows
    return jax.lax.all_gather(rows, batch_axis.name, tiled=True)


def take_local_rows(whole: Tree, batch_axis: BatchAxis | None) -> Tree:
    """Take the rows of this device's samples.

    Args:
      whole: tree of arrays `[B, ...]`, a row for each sample of the whole batch.
      batch_axis: the devices that share the batch; None: the batch is whole.

    Returns:
      Tree of arrays `[ceil(B / num_shards), ...]`. Zeros fill up the last part.
    """
    if batch_axis is None:
        return whole
    shard_index = jax.lax.axis_index(batch_axis.name)

    def take_rows(leaf: jax.Array) -> jax.Array:
        num_rows = -(-leaf.shape[0] // batch_axis.num_shards)
        num_padding = batch_axis.num_shards * num_rows - leaf.shape[0]
        padded = pad_rows(leaf, num_padding)
        return jax.lax.dynamic_slice_in_dim(padded, shard_index * num_rows, num_rows)

    return jax.tree.map(take_rows, whole)
