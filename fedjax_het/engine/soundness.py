"""Whether a federation is still sound: a run whose numbers are not finite has diverged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedjax_het.common.arrays import host_values
from fedjax_het.engine.plan import AXIS, Plan

Tree = Any


def not_finite(tree: Tree) -> jax.Array:
    """[L] int32: how many entries of each of the L floating leaves are infinite or NaN. Keys,
    integers and truth values have none.

    Counted, and not only asked for, since a state may begin with some of them: bounds that nothing
    has reached, entries that nothing has been written to. What grows is divergence.
    """
    floats = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(tree)) if _is_float(leaf)]
    counts = [(~jnp.isfinite(leaf)).sum(dtype=jnp.int32) for leaf in floats]
    return jnp.stack(counts) if counts else jnp.zeros(0, jnp.int32)


def still_finite(new: Tree, old: Tree) -> jax.Array:
    """[] bool: whether no leaf has more entries that are not finite than it had in `old`, which is
    looked at only where there are some now.

    Cost: one pass over `new`.
    """
    now = not_finite(new)
    return jax.lax.cond(now.any(), lambda: (now <= not_finite(old)).all(), lambda: jnp.array(True))


def not_finite_apart(plan: Plan, tree: Tree) -> jax.Array:
    """`not_finite` of what all devices hold.

    Cost: one pass over it. No collective: where devices share the lanes each counts in its own
      copy, which XLA, left to itself, would share out; see `lanes._exchange`.
    """
    if plan.spreads != AXIS:
        return not_finite(tree)
    alone = jax.shard_map(not_finite, mesh=plan.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return alone(tree)


def not_finite_of_runs(state: Any, *, apart: bool) -> np.ndarray:
    """[F, L] on the host: `not_finite` of the state of each run; `apart`: whether they have an axis
    for it, else there is one."""
    return np.atleast_2d(host_values((_of_each if apart else _of_one)(state)))


_of_one = jax.jit(not_finite)
_of_each = jax.jit(jax.vmap(not_finite))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
