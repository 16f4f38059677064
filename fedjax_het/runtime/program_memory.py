"""The memory that compiled programs need, and smaller placements for runs that do not fit."""

import dataclasses
from collections.abc import Callable

import jax

from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.core.memory import compute_compiled_bytes, lower_bound_bytes, total_free_bytes
from fedjax_het.runtime.build import RunGroup
from fedjax_het.runtime.group_init import list_programs
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.memory_limits import InsufficientMemoryError, format_bytes
from fedjax_het.runtime.placement import AUTO, HOST_STATE, Placement


def measure_required_memory(group_state: GroupState) -> int:
    """Compile the programs and return the bytes that they need on each device.

    No array is allocated.
    """
    return max(compute_compiled_bytes(*program) for program in list_programs(group_state).values())


def require_memory_for_programs(group_state: GroupState, memory: int | None) -> None:
    """Compile the programs of runs, and check the memory that they need.

    The compiled programs are kept for when the programs run.

    Args:
      group_state: the runs.
      memory: bytes that they may use on each device (default: the free bytes).

    Raises:
      InsufficientMemoryError: if a program needs more.
    """
    group, spec = group_state.group, group_state.prepared_runs[0].spec
    plan, programs = group.program.plan, list_programs(group_state).items()
    available_bytes = memory or total_free_bytes(plan.devices)

    def check(name: str, required: int, qualifier: str = "") -> None:
        if available_bytes is None or required <= available_bytes:
            return
        fraction = available_bytes / required
        batch_size = int(spec.batch_size * fraction)
        suggestions = [f"lanes = {max(1, int(plan.lanes * fraction))}"] if plan.lanes > 1 else []
        if _can_page_client_states(group):
            suggestions.append("client_state = 'host'")
        if batch_size >= 1:
            suggestions.append(f"batch_size = {batch_size}")
        raise InsufficientMemoryError(
            f"batch_size = {spec.batch_size!r}: the {name} of {spec.algorithm} need {qualifier}"
            f"{format_bytes(required)} on each device, and {format_bytes(available_bytes)} are "
            f"available: expected {', '.join([*suggestions, 'a smaller network'])} or more memory"
        )

    for name, (jitted, inputs) in programs:
        check(name, lower_bound_bytes(jitted.trace(*inputs).jaxpr), "at least ")
    for name, (jitted, inputs) in programs:
        required = compute_compiled_bytes(jitted, inputs)
        if not memory:  # inputs that are placed already are not part of the free bytes
            placed = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array)]
            required -= num_bytes([leaf.addressable_data(0) for leaf in placed])
        check(name, required)


def init_within_memory(init: Callable[[Placement], GroupState], placement: Placement) -> GroupState:
    """Initialize a run with the placement, or with the first smaller one whose programs fit.

    Client states move to the host first, then the lanes are halved, as far as the user's
    `placement` leaves these open.

    Args:
      init: returns the run of a placement before the first round.
      placement: the user's placement.

    Returns:
      The run before the first round.

    Raises:
      InsufficientMemoryError: if the programs of no such placement fit.
    """
    candidate, compile_seconds = placement, 0.0
    while True:
        group_state = init(candidate)
        timing = group_state.timing
        timing.compile_seconds += compile_seconds
        group, lanes = group_state.group, group_state.group.program.plan.lanes
        try:
            with timing.record_compilation():
                require_memory_for_programs(group_state, placement.memory)
            return group_state
        except InsufficientMemoryError:
            compile_seconds = timing.compile_seconds
            client_state = group.client_state
            if placement.client_state == AUTO and _can_page_client_states(group):
                client_state = HOST_STATE
            elif placement.lanes == AUTO and lanes > 1:
                lanes //= 2
            else:
                raise
            candidate = dataclasses.replace(placement, lanes=lanes, client_state=client_state)


def _can_page_client_states(group: RunGroup) -> bool:
    """Return whether there are client states on the devices that could be on the host."""
    is_on_devices = group.state_bytes > 0 and group.client_state != HOST_STATE
    return is_on_devices and group.program.algorithm.can_page_state
