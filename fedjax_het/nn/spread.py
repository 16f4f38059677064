"""A batch that is spread over devices, each of which goes through its part of the samples.

What is computed of each sample by itself needs to know nothing of it. What is computed of the whole
batch does: batch norm's statistics are sums over all parts; a mask or an augmentation that is drawn
for the whole batch is the own rows of that. Whether a batch is spread is a matter of the program
that is being traced, not of the network: whoever splits one says so with `spread_over`, around the
calls.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_het.common.arrays import with_rows_of_zeros

Tree = Any


class Spread(NamedTuple):
    """Over which devices: `parts` along an axis of the mesh."""

    axis: str
    parts: int


_SPREAD: ContextVar[Spread | None] = ContextVar("spread", default=None)


@contextlib.contextmanager
def spread_over(spread: Spread | None) -> Iterator[None]:
    """What is traced inside sees a part of a batch; for None, all of it."""
    token = _SPREAD.set(spread)
    try:
        yield
    finally:
        _SPREAD.reset(token)


def num_parts() -> int:
    """Into how many parts the batch is split; 1 if it is whole."""
    spread = _SPREAD.get()
    return 1 if spread is None else spread.parts


def row_numbers(rows: int) -> jax.Array:
    """Which of the whole batch's rows the samples at hand are."""
    spread = _SPREAD.get()
    first = 0 if spread is None else jax.lax.axis_index(spread.axis) * rows
    return first + jnp.arange(rows)


def over_whole_batch(sums: Tree) -> Tree:
    """Sums over the samples at hand -> over those of the whole batch. One collective if spread.

    Differentiated, a device's loss has to be that of its part, and gradients to be added up.
    """
    spread = _SPREAD.get()
    if spread is None:
        return sums
    flat, unravel = ravel_pytree(sums)
    return unravel(jax.lax.psum(flat, spread.axis))


def whole_rows(own: jax.Array) -> jax.Array:
    """The rows of the whole batch, of those of the samples at hand. One collective if spread; parts
    have to be full. Differentiated as `over_whole_batch` is."""
    spread = _SPREAD.get()
    if spread is None:
        return own
    return jax.lax.all_gather(own, spread.axis, tiled=True)


def own_rows(whole: Tree) -> Tree:
    """Of arrays with a row for each sample of the whole batch, those of the samples at hand.

    Parts are of equal size: where they cannot be, the last is filled up with zeros.
    """
    spread = _SPREAD.get()
    if spread is None:
        return whole
    place = jax.lax.axis_index(spread.axis)

    def own(leaf: jax.Array) -> jax.Array:
        rows = -(-leaf.shape[0] // spread.parts)
        missing = spread.parts * rows - leaf.shape[0]
        filled = with_rows_of_zeros(leaf, missing)
        return jax.lax.dynamic_slice_in_dim(filled, place * rows, rows)

    return jax.tree.map(own, whole)
