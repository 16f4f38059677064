"""Gradients of sums over samples, computed a few samples at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.utils.arrays import pad_rows

Tree = Any


def micro_batched_value_and_grad(
    loss_sum: Callable, micro_batch: int | None, has_aux: bool = False
) -> Callable:
    """Transform `loss_sum` like `jax.value_and_grad`, in micro-batches that fit a CPU core's cache.

    `loss_sum(params, batch)` must be a *sum* (not a mean) of losses, each of which depends on its
    own sample alone; batch normalization violates this. The auxiliary output must be a tree of sums
    too. For the gradient of the mean, divide the result by the number of samples. Add terms of the
    parameters alone, such as a proximal term, outside.

    On a CPU a ConvNet's training step waits for memory when its activations exceed the cache;
    `Model.micro_batch` is the size that fits. The batch is split into equal pieces of at most that
    size. It stays whole if no divisor of the batch size is at least half as large, on other
    backends, and for `micro_batch=None`.

    Args:
      loss_sum: `(params, batch) -> loss`, or `(loss, aux)` with `has_aux`; `batch` is a tree of
        arrays with the same leading axis B.
      micro_batch: maximum number of samples per piece, or None.
      has_aux: whether `loss_sum` returns an auxiliary output.

    Returns:
      `(params, batch) -> (value, gradient)` of the sum over the batch.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.nn import micro_batched_value_and_grad
      >>> function = micro_batched_value_and_grad(lambda w, x: (w * x).sum(), 2)
      >>> value, gradient = function(jnp.float32(3.0), jnp.arange(4.0))
      >>> float(value), float(gradient)
      (18.0, 6.0)
    """
    value_and_grad = jax.value_and_grad(loss_sum, has_aux=has_aux)

    def accumulate(params, batch):
        def compute_sums(samples):
            return value_and_grad(params, samples), ()

        return accumulate_micro_batches(compute_sums, batch, micro_batch=micro_batch)[0]

    return accumulate


def accumulate_micro_batches(
    function: Callable[[Tree], tuple[Tree, Tree]],
    samples: Tree,
    *,
    micro_batch: int | None,
    pad_last: bool = False,
) -> tuple[Tree, Tree]:
    """Apply a function to micro-batches, add its sums and concatenate its entries.

    Args:
      function: `samples -> (tree of sums over samples, tree of arrays with an entry per sample)`.
      samples: tree of arrays with the same leading axis B.
      micro_batch: maximum number of samples per piece, see `choose_micro_batch_size`; None: all.
      pad_last: whether to fill up the last piece with samples of zeros, so that all pieces have
        `micro_batch` samples. Samples of zeros must then add nothing to the sums.

    Returns:
      The sums and the entries, `[B, ...]`, of all samples.
    """
    num_samples = jax.tree.leaves(samples)[0].shape[0]
    if pad_last and micro_batch is not None and num_samples > micro_batch and _uses_micro_batches():
        num_padding = -num_samples % micro_batch
        padded = jax.tree.map(lambda leaf: pad_rows(leaf, num_padding), samples)
        sums, entries = accumulate_micro_batches(function, padded, micro_batch=micro_batch)
        return sums, jax.tree.map(lambda leaf: leaf[:num_samples], entries)
    size = choose_micro_batch_size(num_samples, micro_batch)
    if size == num_samples:
        return function(samples)
    micro_batches = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), samples)

    def add_micro_batch(total, samples):
        sums, entries = function(samples)
        return jax.tree.map(jnp.add, total, sums), entries

    zero_sums = make_zero_sums(lambda samples: function(samples)[0], micro_batches)
    sums, entries = jax.lax.scan(add_micro_batch, zero_sums, micro_batches)
    return sums, jax.tree.map(lambda leaf: leaf.reshape(num_samples, *leaf.shape[2:]), entries)


def make_zero_sums(function: Callable[[Tree], Tree], micro_batches: Tree) -> Tree:
    """Return zeros like the result of a function of a micro-batch.

    Args:
      function: `samples -> tree of sums over samples`.
      micro_batches: tree of micro-batches, with a leading axis of micro-batches.

    Returns:
      A tree of zeros.
    """
    first_micro_batch = jax.tree.map(lambda leaf: leaf[0], micro_batches)
    # `zeros_like` of the abstract values also copies the mesh axes that they vary on.
    return jax.tree.map(jnp.zeros_like, jax.eval_shape(function, first_micro_batch))


def choose_micro_batch_size(batch_size: int, micro_batch: int | None) -> int:
    """Choose the number of samples of a batch to process at once.

    Args:
      batch_size: number of samples of the batch, B.
      micro_batch: maximum number of samples that fit the cache, or None.

    Returns:
      On a CPU the largest divisor of B that is at most `micro_batch`, if it is at least half of
      `micro_batch`; otherwise B.

    Example:
      >>> from fedjax_het.nn import choose_micro_batch_size
      >>> choose_micro_batch_size(12, None)
      12
    """
    if micro_batch is None or not _uses_micro_batches():
        return batch_size
    divisors = (size for size in range(micro_batch, 0, -1) if batch_size % size == 0)
    largest = next(divisors, batch_size)
    return largest if 2 * largest >= micro_batch else batch_size


def _uses_micro_batches() -> bool:
    """Return whether the default backend is a CPU, where micro-batches pay off."""
    return jax.default_backend() == "cpu"
