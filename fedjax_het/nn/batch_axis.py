"""A batch that several devices share, each of which holds a part of the samples.

Values of each sample by itself do not depend on the other devices. Values of the whole batch do:
batch norm's statistics are sums over all parts, and a mask or an augmentation that is drawn for the
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
    """Return `batch_axis` as a keyword argument, without it where the batch is whole.

    Functions that never see a part of a batch need not have the argument.
    """
    return {} if batch_axis is None else {"batch_axis": batch_axis}


def get_num_shards(batch_axis: BatchAxis | None) -> int:
    """Return the number of parts of the batch; 1 if it is whole."""
    return 1 if batch_axis is None else batch_axis.num_shards


def get_global_row_indices(num_rows: int, batch_axis: BatchAxis | None) -> jax.Array:
    """Return the rows of the whole batch that this device's `num_rows` samples are."""
    first = 0 if batch_axis is None else jax.lax.axis_index(batch_axis.name) * num_rows
    return first + jnp.arange(num_rows)


def sum_over_shards(sums: Tree, batch_axis: BatchAxis | None) -> Tree:
    """Add up sums over this device's samples to sums over the whole batch.

    Args:
      sums: any tree of arrays.
      batch_axis: the devices that share the batch. If there are any, this is one collective.
        Differentiated, a device's loss has to be that of its part, and gradients to be added up.

    Returns:
      A tree like `sums`.
    """
    if batch_axis is None:
        return sums
    flat, unravel = ravel_pytree(sums)
    return unravel(jax.lax.psum(flat, batch_axis.name))


def gather_rows(rows: jax.Array, batch_axis: BatchAxis | None) -> jax.Array:
    """Gather the rows of the whole batch from those of all devices.

    Args:
      rows: a row for each of this device's samples; all parts have to be full.
      batch_axis: the devices that share the batch. If there are any, this is one collective, which
        is differentiated as `sum_over_shards` is.

    Returns:
      A row for each sample of the whole batch.
    """
    if batch_axis is None:
        return rows
    return jax.lax.all_gather(rows, batch_axis.name, tiled=True)


def take_local_rows(whole: Tree, batch_axis: BatchAxis | None) -> Tree:
    """Take the rows of this device's samples.

    Args:
      whole: a tree of arrays with a row for each sample of the whole batch.
      batch_axis: the devices that share the batch.

    Returns:
      A tree like `whole`. Parts are of equal size; zeros fill up the last one.
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
