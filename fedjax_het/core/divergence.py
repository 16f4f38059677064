"""Divergence of a run: its state has new entries that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedjax_het.core.execution_plan import LANES_AXIS, ExecutionPlan
from fedjax_het.utils.arrays import fetch_to_host

Tree = Any


def count_nonfinite(tree: Tree) -> jax.Array:
    """Count the infinite and NaN entries of each of the L floating leaves, `[L]` int32.

    A state may begin with such entries: bounds that are not reached yet, entries that are not
    written yet. Growth of the count is divergence.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.divergence import count_nonfinite
      >>> count_nonfinite({"a": jnp.array([1.0, jnp.inf]), "b": jnp.arange(3)}).tolist()
      [1]
    """
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    counts = [(~jnp.isfinite(leaf)).sum(dtype=jnp.int32) for leaf in floats]
    return jnp.stack(counts) if counts else jnp.zeros(0, jnp.int32)


def has_no_new_nonfinite(new: Tree, old: Tree) -> jax.Array:
    """Return whether no leaf has more entries that are not finite than before.

    Cost: one pass over `new`; `old` is read only if `new` has such entries.

    Args:
      new: the new arrays.
      old: the old arrays, of the same structure.

    Returns:
      `[]` bool.
    """
    new_counts = count_nonfinite(new)
    return jax.lax.cond(
        new_counts.any(),
        lambda: (new_counts <= count_nonfinite(old)).all(),
        lambda: jnp.array(True),
    )


def count_nonfinite_replicated(plan: ExecutionPlan, tree: Tree) -> jax.Array:
    """Count the entries that are not finite of arrays that all devices hold.

    Cost: one pass over the arrays. No collective: where devices share the lanes, each counts in its
    own copy. XLA would split the count between them, see
    `device_exchange.exchange_between_devices`.

    Args:
      plan: the devices.
      tree: the arrays.

    Returns:
      The number of such entries of each floating leaf, `[L]` int32.
    """
    if plan.mesh_axis != LANES_AXIS:
        return count_nonfinite(tree)
    count_on_device = jax.shard_map(
        count_nonfinite, mesh=plan.mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return count_on_device(tree)


def count_nonfinite_per_run(state: Any, *, has_run_axis: bool) -> np.ndarray:
    """Count the entries that are not finite of the state of each run, on the host.

    Args:
      state: the states.
      has_run_axis: whether they have a leading axis of runs; else there is one run.

    Returns:
      The number of such entries of each floating leaf, `[F, L]` int32.
    """
    count = _count_each_run if has_run_axis else _count_single_run
    return np.atleast_2d(fetch_to_host(count(state)))


_count_single_run = jax.jit(count_nonfinite)
_count_each_run = jax.jit(jax.vmap(count_nonfinite))
