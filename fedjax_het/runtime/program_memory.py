"""The memory that compiled programs need, and smaller placements for runs that do not fit."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.core.memory import compute_compiled_bytes, lower_bound_bytes, total_free_bytes
from fedjax_het.runtime.build import RunGroup
from fedjax_het.runtime.compiled_programs import build_programs
from fedjax_het.runtime.group_init import list_programs
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.memory_limits import (
    InsufficientMemoryError,
    compare_with_defaults,
    format_bytes,
)
from fedjax_het.runtime.placement import AUTO, HOST_STATE, PAGED_STATES, Placement
from fedjax_het.runtime.signature import to_items
from fedjax_het.utils.errors import ConfigError, display_name


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
        problem = (
            f"the {name} of {spec.algorithm} need {qualifier}{format_bytes(required)} on each "
            f"device, and {format_bytes(available_bytes)} are available"
        )
        if (option := _find_largest_option(group_state)) is not None:
            max_value = int(option.value - (required - available_bytes) / option.bytes_per_unit)
            expected = f"at most {max_value}" if max_value >= 1 else "a smaller number"
            raise InsufficientMemoryError(
                f"{display_name(f'options {option.name}')} = {option.value}: expected {expected} "
                f"or more memory, as {problem}"
            )
        fraction = available_bytes / required
        batch_size = int(spec.batch_size * fraction)
        suggestions = [f"lanes = {max(1, int(plan.lanes * fraction))}"] if plan.lanes > 1 else []
        if _can_page_client_states(group):
            suggestions.append("client_state = 'host'")
        if batch_size >= 1:
            suggestions.append(f"batch_size = {batch_size}")
        raise InsufficientMemoryError(
            f"{display_name('batch_size')} = {spec.batch_size!r}: {problem}: expected "
            f"{', '.join([*suggestions, 'a smaller network'])} or more memory"
        )

    for name, (jitted, inputs) in programs:
        check(name, _compute_lower_bound(jitted, inputs), "at least ")
    for name, (jitted, inputs) in programs:
        required = compute_compiled_bytes(jitted, inputs)
        if not memory:  # inputs that are placed already are not part of the free bytes
            placed = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array)]
            required -= num_bytes([leaf.addressable_data(0) for leaf in placed])
        check(name, required)


def _compute_lower_bound(jitted: Any, inputs: tuple) -> int:
    """Return a lower bound of the bytes on each device: one result, or the state of the runs."""
    placed_state = [
        jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(inputs)
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
    ]
    return max(lower_bound_bytes(jitted.trace(*inputs).jaxpr), num_bytes(placed_state))


class _OptionMemory(NamedTuple):
    """An option of the method on which the memory of the programs depends."""

    name: str
    value: int
    bytes_per_unit: float
    "Bytes on each device that one unit less would save."


def _find_largest_option(group_state: GroupState) -> _OptionMemory | None:
    """Return the whole-number option that accounts for most memory; None without such an option.

    Half of the option's value lowers the bound of the traced programs more than half of the value
    of another option. Among nearly equal options, the largest multiple of its default counts. Cost:
    a trace of the programs for each option; nothing compiles.
    """
    group = group_state.group
    signature, plan = group.program.signature, group.program.plan
    options = dict(signature.options)

    def compute_bound(options: dict[str, Any]) -> int:
        changed_signature = signature._replace(options=to_items(options))
        changed_group = dataclasses.replace(group, program=build_programs(changed_signature, plan))
        # A round in parts has the loops of the unchanged options.
        changed = dataclasses.replace(group_state, group=changed_group, loop_layout=None)
        return max(_compute_lower_bound(*program) for program in list_programs(changed).values())

    bound, found = compute_bound(options), []
    for name, value in options.items():
        if type(value) is int and value > 1:
            try:
                saved = bound - compute_bound({**options, name: value // 2})
            except ConfigError:  # the option allows no such value
                continue
            found.append(_OptionMemory(name, value, saved / (value - value // 2)))
    max_bytes = max((option.bytes_per_unit * option.value for option in found), default=0)
    # Memory may be the product of two options: the option far above its default is named.
    ratios = compare_with_defaults(signature.algorithm, options)
    candidates = [o for o in found if 0 < 0.9 * max_bytes <= o.bytes_per_unit * o.value]
    return max(candidates, key=lambda option: ratios[option.name], default=None)


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
    is_on_devices = group.state_bytes > 0 and group.client_state not in PAGED_STATES
    return is_on_devices and group.program.algorithm.can_page_state
