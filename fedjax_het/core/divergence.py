"""Whether a federation is still sound: a run whose numbers are not finite has diverged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedjax_het.core.execution_plan import LANES_AXIS, ExecutionPlan
from fedjax_het.utils.arrays import fetch_to_host

Tree = Any


def count_nonfinite(tree: Tree) -> jax.Array:
    """[L] int32: how many entries of each of the L floating leaves are infinite or NaN. Keys,
    integers and truth values have none.

    Counted, and not only asked for, since a state may begin with some of them: bounds that nothing
    has reached, entries that nothing has been written to. What grows is divergence.
    """
    floats = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(tree)) if _is_float(leaf)]
    counts = [(~jnp.isfinite(leaf)).sum(dtype=jnp.int32) for leaf in floats]
    return jnp.stack(counts) if counts else jnp.zeros(0, jnp.int32)


def has_no_new_nonfinite(new: Tree, old: Tree) -> jax.Array:
    """[] bool: whether no leaf has more entries that are not finite than it had in `old`, which is
    looked at only where there are some now.

    Cost: one pass over `new`.
    """
    new_counts = count_nonfinite(new)
    return jax.lax.cond(
        new_counts.any(),
        lambda: (new_counts <= count_nonfinite(old)).all(),
        lambda: jnp.array(True),
    )


def count_nonfinite_replicated(plan: ExecutionPlan, tree: Tree) -> jax.Array:
    """`not_finite` of what all devices hold.

    Cost: one pass over it. No collective: where devices share the lanes each counts in its own
      copy, which XLA, left to itself, would share out; see `device_exchange.exchange_between_devices`.
    """
    if plan.mesh_axis != LANES_AXIS:
        return count_nonfinite(tree)
    count_on_device = jax.shard_map(
        count_nonfinite, mesh=plan.mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return count_on_device(tree)


def count_nonfinite_per_run(state: Any, *, has_run_axis: bool) -> np.ndarray:
    """[F, L] on the host: `not_finite` of the state of each run; `apart`: whether they have an axis
    for it, else there is one."""
    return np.atleast_2d(
        fetch_to_host((_count_each_run if has_run_axis else _count_single_run)(state))
    )


_count_single_run = jax.jit(count_nonfinite)
_count_each_run = jax.jit(jax.vmap(count_nonfinite))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
