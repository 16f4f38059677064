"""Whether a federation is still sound: a run whose numbers are not finite has diverged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedjax_het.common.arrays import AnyArray, host_values, row_of
from fedjax_het.engine.lanes import client_row
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


def not_finite_in_round(
    plan: Plan, state: Any, rows: AnyArray, r: jax.Array, *, by_row: bool
) -> jax.Array:
    """`not_finite` of a federation's `State`, before or after the r-th round of a chunk.

    Args:
      rows: [R, n], where the states of the clients of each round are: `RoundSchedule.changed`.
      by_row: whether a round changes these alone; then the others are not looked at.
    Cost: one pass over what it looks at. No collective: where devices share the lanes each looks at
      its own copy, which XLA, left to itself, would share out (as it does `RoundSchedule.rows`,
      since lanes read their part of it); see `lanes._exchange`.
    """

    def count(server, clients, rows, r):
        of_server = not_finite(server)
        if not by_row or not any(map(_is_float, jax.tree.leaves(clients))):
            return jnp.concatenate([of_server, not_finite(clients)])
        here = row_of(rows, r)

        def add(i, total):
            return total + not_finite(client_row(clients, row_of(here, i)))

        nothing = jnp.zeros_like(jax.eval_shape(not_finite, client_row(clients, 0)))
        of_clients = jax.lax.fori_loop(0, here.shape[0], add, nothing)
        return jnp.concatenate([of_server, of_clients])

    given = (state.server, state.clients, rows, r)
    if plan.spreads != AXIS:
        return count(*given)
    alone = jax.shard_map(count, mesh=plan.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return alone(*given)


def not_finite_of_runs(state: Any, *, apart: bool) -> np.ndarray:
    """[F, L] on the host: `not_finite` of the state of each run; `apart`: whether they have an axis
    for it, else there is one."""
    return np.atleast_2d(host_values((_of_each if apart else _of_one)(state)))


_of_one = jax.jit(not_finite)
_of_each = jax.jit(jax.vmap(not_finite))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
