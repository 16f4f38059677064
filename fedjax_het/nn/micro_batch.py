"""The gradient of a sum over samples, a few samples at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.utils.arrays import pad_rows

Tree = Any


def micro_batched_value_and_grad(
    loss_sum: Callable, micro_batch: int | None, has_aux: bool = False
) -> Callable:
    """Like `jax.value_and_grad(loss_sum, has_aux=has_aux)`, in pieces that stay in a core's cache.

    `loss_sum(params, batch)` must add up over samples: a *sum* of per-sample losses (not a mean),
    each of which depends on its own sample alone, as without batch normalisation. So must `aux`, a
    tree of sums. `batch` is a tree of arrays with the same leading axis B. Divide what comes back
    by the number of samples for the gradient of the mean; terms of the parameters alone, such as a
    proximal term, are added outside.

    On CPU a ConvNet's training step waits for memory when its activations outgrow the cache;
    `Model.micro_batch` is the size that fits. The batch is split into equal pieces of at most that
    size; it is left whole where none at least half as large divides it, on other backends, and for
    `micro_batch=None`.
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
    """`function(samples) -> (sums over samples, an entry for each sample)`, in equal pieces of the
    samples as `choose_micro_batch_size` has them.

    pad_last: samples of zeros add nothing to the sums, so that the last piece may be filled up with
        them: all pieces then are of `micro_batch` samples.
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

    # `zeros_like` of these shapes also takes over which mesh axes they vary on.
    first_micro_batch = jax.tree.map(lambda leaf: leaf[0], micro_batches)
    zero_sums = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, first_micro_batch)[0])
    sums, entries = jax.lax.scan(add_micro_batch, zero_sums, micro_batches)
    return sums, jax.tree.map(lambda leaf: leaf.reshape(num_samples, *leaf.shape[2:]), entries)


def choose_micro_batch_size(batch_size: int, micro_batch: int | None) -> int:
    """How many of a batch to take at once: equal pieces of at most `micro_batch` on a CPU, if one
    at least half as large divides the batch; else all."""
    if micro_batch is None or not _uses_micro_batches():
        return batch_size
    divisors = (size for size in range(micro_batch, 0, -1) if batch_size % size == 0)
    largest = next(divisors, batch_size)
    return largest if 2 * largest >= micro_batch else batch_size


def _uses_micro_batches() -> bool:
    return jax.default_backend() == "cpu"
