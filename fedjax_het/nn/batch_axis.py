"""A batch that is spread over devices, each of which goes through its part of the samples.

What is computed of each sample by itself needs to know nothing of it. What is computed of the whole
batch does: batch norm's statistics are sums over all parts; a mask or an augmentation that is drawn
for the whole batch is the own rows of that. Whether a batch is spread is a matter of the program
that is being traced, not of the network: whoever splits one says so with `use_batch_axis`, around the
calls.
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
    """Over which devices: `parts` along an axis of the mesh."""

    axis: str
    num_shards: int


_BATCH_AXIS: ContextVar[BatchAxis | None] = ContextVar("spread", default=None)


@contextlib.contextmanager
def use_batch_axis(batch_axis: BatchAxis | None) -> Iterator[None]:
    """What is traced inside sees a part of a batch; for None, all of it."""
    token = _BATCH_AXIS.set(batch_axis)
    try:
        yield
    finally:
        _BATCH_AXIS.reset(token)


def get_num_shards() -> int:
    """Into how many parts the batch is split; 1 if it is whole."""
    batch_axis = _BATCH_AXIS.get()
    return 1 if batch_axis is None else batch_axis.num_shards


def get_global_row_indices(rows: int) -> jax.Array:
    """Which of the whole batch's rows the samples at hand are."""
    batch_axis = _BATCH_AXIS.get()
    first = 0 if batch_axis is None else jax.lax.axis_index(batch_axis.axis) * rows
    return first + jnp.arange(rows)


def sum_over_shards(sums: Tree) -> Tree:
    """Sums over the samples at hand -> over those of the whole batch. One collective if spread.

    Differentiated, a device's loss has to be that of its part, and gradients to be added up.
    """
    batch_axis = _BATCH_AXIS.get()
    if batch_axis is None:
        return sums
    flat, unravel = ravel_pytree(sums)
    return unravel(jax.lax.psum(flat, batch_axis.axis))


def gather_rows(rows: jax.Array) -> jax.Array:
    """The rows of the whole batch, of those of the samples at hand. One collective if spread; parts
    have to be full. Differentiated as `sum_over_shards` is."""
    batch_axis = _BATCH_AXIS.get()
    if batch_axis is None:
        return rows
    return jax.lax.all_gather(rows, batch_axis.axis, tiled=True)


def take_local_rows(whole: Tree) -> Tree:
    """Of arrays with a row for each sample of the whole batch, those of the samples at hand.

    Parts are of equal size: where they cannot be, the last is filled up with zeros.
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
