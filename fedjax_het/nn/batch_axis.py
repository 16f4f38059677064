"""Operations on a batch that several devices share, each with its part of the samples.

Computations on each sample alone do not depend on whether the batch is shared. Computations on the
whole batch do: batch norm's statistics are sums over the samples of all devices, and a device uses
its own rows of a mask or an augmentation that is drawn for the whole batch. Sharing is a property
of the program that is traced, not of the network: the code that splits a batch wraps the calls in
`use_batch_axis`.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_het.utils.arrays import pad_rows

Tree = Any


class BatchAxis(NamedTuple):
    """The axis of a device mesh along which a batch is split.

    Attributes:
      axis: name of the mesh axis.
      num_shards: number of parts of the batch, one per device along the axis.
    """

    axis: str
    num_shards: int


_BATCH_AXIS: ContextVar[BatchAxis | None] = ContextVar("spread", default=None)


@contextlib.contextmanager
def use_batch_axis(batch_axis: BatchAxis | None) -> Iterator[None]:
    """Trace the code inside for one device's part of a batch.

    Args:
      batch_axis: how the batch is split; None: the code sees the whole batch.
    """
    token = _BATCH_AXIS.set(batch_axis)
    try:
        yield
    finally:
        _BATCH_AXIS.reset(token)


def get_num_shards() -> int:
    """Return the number of parts of the batch; 1 if the batch is whole."""
    batch_axis = _BATCH_AXIS.get()
    return 1 if batch_axis is None else batch_axis.num_shards


def get_global_row_indices(rows: int) -> jax.Array:
    """Return the positions of the local samples in the whole batch.

    Args:
      rows: number of local samples, n.

    Returns:
      int32 `[n]`.
    """
    batch_axis = _BATCH_AXIS.get()
    first = 0 if batch_axis is None else jax.lax.axis_index(batch_axis.axis) * rows
    return first + jnp.arange(rows)


def sum_over_shards(sums: Tree) -> Tree:
    """Add the devices' sums over their samples: one collective if the batch is shared.

    If the result is differentiated, each device's loss must be the loss of its own samples, and the
    devices' gradients must be added.

    Args:
      sums: tree of arrays, sums over the local samples.

    Returns:
      Tree of the same structure, sums over the samples of the whole batch.
    """
    batch_axis = _BATCH_AXIS.get()
    if batch_axis is None:
        return sums
    flat, unravel = ravel_pytree(sums)
    return unravel(jax.lax.psum(flat, batch_axis.axis))


def gather_rows(rows: jax.Array) -> jax.Array:
    """Collect the rows of all devices: one collective if the batch is shared.

    All parts must be full. If the result is differentiated, each device's loss must be the loss of
    its own samples, and the devices' gradients must be added.

    Args:
      rows: `[n, ...]`, a row for each local sample.

    Returns:
      `[num_shards * n, ...]`, a row for each sample of the whole batch.
    """
    batch_axis = _BATCH_AXIS.get()
    if batch_axis is None:
        return rows
    return jax.lax.all_gather(rows, batch_axis.axis, tiled=True)


def take_local_rows(whole: Tree) -> Tree:
    """Select the local samples' rows from arrays of the whole batch.

    All parts have equal size; if the batch size is not a multiple, zeros fill up the last part.

    Args:
      whole: tree of arrays `[B, ...]`, a row for each sample of the whole batch.

    Returns:
      Tree of arrays `[ceil(B / num_shards), ...]`.
    """
    spread = _BATCH_AXIS.get()
    if spread is None:
        return whole
    place = jax.lax.axis_index(spread.axis)

    def own(leaf: jax.Array) -> jax.Array:
        rows = -(-leaf.shape[0] // spread.num_shards)
        missing = spread.num_shards * rows - leaf.shape[0]
        filled = pad_rows(leaf, missing)
        return jax.lax.dynamic_slice_in_dim(filled, place * rows, rows)

    return jax.tree.map(own, whole)
