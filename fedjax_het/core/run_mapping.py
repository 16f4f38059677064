"""Several federations side by side: on several devices, and vmapped on each of them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from fedjax_het.core.client_loop import RoundSchedule
from fedjax_het.core.execution_plan import (
    LANES_AXIS,
    PER_DEVICE,
    PER_RUN,
    REPLICATED,
    RUNS_AXIS,
    ExecutionPlan,
)

_PER_DEVICE_FIELDS = (
    *("round", "num_clients", "is_eval_round", "is_verification", "max_steps"),
    *("num_segments", "segment_ends"),
)
# Placements of a schedule's fields, see `map_runs`. Vmapped federations go through the
# same rounds and segments, so that every loop has one bound.
SCHEDULE_PLACEMENTS: Any = RoundSchedule._make(
    PER_DEVICE if name in _PER_DEVICE_FIELDS else PER_RUN for name in RoundSchedule._fields
)


def map_runs(plan: ExecutionPlan, function: Callable, placements: tuple) -> Callable:
    """Map a function of one federation over all federations that run at once.

    If federations are vmapped, arguments per device have no axis of federations: loops that depend
    on them run in lockstep. With lanes spread over the devices there is one federation, and nothing
    to map.

    Args:
      plan: the devices.
      function: the function of one federation.
      placements: for each argument, or for each part of it: PER_RUN (a leading axis of
        federations), PER_DEVICE (a leading axis of devices), or REPLICATED (shared).

    Returns:
      The function of all federations, whose results have a leading axis of federations.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.execution_plan import PER_RUN, make_execution_plan
      >>> from fedjax_het.core.run_mapping import map_runs
      >>> plan = make_execution_plan(devices=1, mesh_axis="runs", num_parallel=3)
      >>> map_runs(plan, jnp.sum, (PER_RUN,))(jnp.ones((3, 2))).tolist()
      [2.0, 2.0, 2.0]
    """
    if plan.mesh_axis != RUNS_AXIS:
        return function
    specs = jax.tree.map(lambda kind: P() if kind == REPLICATED else P(RUNS_AXIS), placements)
    axes = jax.tree.map(lambda kind: 0 if kind == PER_RUN else None, placements)
    squeezed_kinds = {PER_DEVICE} if plan.num_parallel > 1 else {PER_DEVICE, PER_RUN}

    def squeeze_leading_axis(kind, tree):
        return jax.tree.map(lambda a: a[0], tree) if kind in squeezed_kinds else tree

    def run_on_device(*args):
        args = jax.tree.map(squeeze_leading_axis, placements, args)
        if plan.num_parallel > 1:
            return jax.vmap(function, in_axes=axes)(*args)
        return jax.tree.map(lambda a: a[None], function(*args))

    return jax.shard_map(
        run_on_device, mesh=plan.mesh, in_specs=specs, out_specs=P(RUNS_AXIS), check_vma=False
    )


def describe_plan(plan: ExecutionPlan) -> str:
    """Return devices, runs, lanes and blocks of a plan as text.

    Example:
      >>> from fedjax_het.core.execution_plan import make_execution_plan
      >>> from fedjax_het.core.run_mapping import describe_plan
      >>> describe_plan(make_execution_plan(lanes=4, devices=1))
      '1 x cpu, 4 vmapped lanes each'
    """
    devices = plan.devices
    lanes_text = "one flat lane" if plan.lanes == 1 else f"{plan.lanes} vmapped lanes"
    block_text = "each" if plan.mesh_axis == LANES_AXIS else f"in {plan.blocks} turns"
    runs_text = "" if plan.mesh_axis != RUNS_AXIS else "a federation on each, "
    if plan.num_parallel > 1:
        runs_text = f"{plan.num_parallel} vmapped federations on each, "
    server_text = ", the server's work shared" if plan.server_parallelism.axis else ""
    devices_text = f"{len(devices)} x {devices[0].device_kind}"
    return f"{devices_text}, {runs_text}{lanes_text} {block_text}{server_text}"
