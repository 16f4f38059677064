"""Lower bounds of the memory that runs need, checked before it is allocated.

The bounds are checked three times, each as early as possible: for the settings, before anything is
timed or placed; for the plan, before data are placed; for the programs, traced and then compiled,
before the first round. A lower bound refuses no run that would fit.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.memory import (
    compute_compiled_bytes,
    free_host_bytes,
    local_devices,
    lower_bound_bytes,
    min_over_processes,
    total_free_bytes,
)
from fedjax_het.core.schedule import Scheduler, compute_cohort_size
from fedjax_het.data import Dataset
from fedjax_het.nn import Model
from fedjax_het.nn.micro_batch import choose_micro_batch_size
from fedjax_het.runtime.compiled_programs import (
    CompiledPrograms,
    Signature,
    compute_client_state_bytes,
)
from fedjax_het.runtime.placement import AUTO, HOST_STATE, SPLIT_STATE, Placement
from fedjax_het.utils.errors import ConfigError

_FLOAT_BYTES = 4  # bytes
_MIN_ACTIVATION_FACTOR = (
    2**14
)  # a batch whose activations could matter: images times so much are not free


class InsufficientMemoryError(ConfigError):
    """A run needs more memory than there is."""


class MemoryItem(NamedTuple):
    """An item that takes memory.

    Attributes:
      setting: the setting with which it grows.
      setting_value: the value of the setting.
      description: the item in words.
      num_bytes: bytes on each device, or on the host.
      alternative: another setting that would help.
    """

    setting: str
    setting_value: Any
    description: str
    num_bytes: int
    alternative: str = ""


def require_memory(items: Sequence[MemoryItem], available_bytes: int | None, location: str) -> None:
    """Require that items fit into the available memory.

    Args:
      items: the items.
      available_bytes: bytes that are available; None if unknown.
      location: the place of the memory in words, as in "are free on each device".

    Raises:
      InsufficientMemoryError: if they do not fit; it names the setting of the largest part.
    """
    required = sum(item.num_bytes for item in items)
    if available_bytes is None or required <= available_bytes:
        return
    bytes_by_setting: dict[str, int] = {}  # with each argument
    for item in items:
        bytes_by_setting[item.setting] = bytes_by_setting.get(item.setting, 0) + item.num_bytes
    largest = max(items, key=lambda item: (bytes_by_setting[item.setting], item.num_bytes))
    setting_bytes = bytes_by_setting[largest.setting]
    fraction = max(0, available_bytes - (required - setting_bytes)) / setting_bytes
    raise InsufficientMemoryError(
        f"{largest.setting} = {largest.setting_value!r}: expected {_suggest_smaller_setting(largest, fraction)}, as the run "
        f"needs at least {_format_bytes(required)}, {_format_bytes(setting_bytes)} of it for {largest.description}, and "
        f"{_format_bytes(available_bytes)} {location}"
    )


def _suggest_smaller_setting(item: MemoryItem, fraction: float) -> str:
    """Return, in words, the value of the setting with which a fraction of the item would remain."""
    fits = int(item.setting_value * fraction) if isinstance(item.setting_value, int) else 0
    if fits >= 1:
        suggestion = f"at most {fits}"
    elif fraction > 0:
        suggestion = f"one that takes at most {_format_bytes(int(fraction * item.num_bytes))}"
    else:
        suggestion = "more memory"
    return f"{suggestion}, or {item.alternative}" if item.alternative else suggestion


def _format_bytes(byte_count: int) -> str:
    return f"{byte_count / 1e9:.2f} GB" if byte_count >= 1e7 else f"{byte_count / 1e6:.3f} MB"


# --- of the settings -----------------------------------------------------------------------------


def require_memory_for_settings(
    spec: ResolvedRunSpec,
    dataset: Dataset,
    signature: Signature,
    placement: Placement,
    devices: Sequence[jax.Device],
) -> None:
    """Check the settings, before a partition is made, a lane is timed or an example is placed.

    Raises:
      InsufficientMemoryError: if not even one run fits, in one lane.
    """
    host_items = list_host_items(spec)
    _require_host_memory(host_items, devices)
    available_bytes = _get_available_bytes(placement, devices)
    device_items = list_device_items(spec, dataset, signature, devices, available_bytes)
    if _uses_host_memory(devices):
        device_items += _share_per_device(host_items, devices)
    require_memory(device_items, available_bytes, _describe_memory_source(placement, devices))


def list_host_items(spec: ResolvedRunSpec) -> list[MemoryItem]:
    """List the items on the host: curves and participants of all rounds."""
    curves = 4 + (spec.num_clients if spec.has_client_tests else 0)
    bytes_per_round = _FLOAT_BYTES * curves + 8 * compute_cohort_size(
        spec.num_clients, spec.participation
    )
    batch = 2 * 4 * spec.batch_size  # a step's indices, as they are drawn and as they are placed
    return [
        MemoryItem(
            "rounds", spec.rounds, "curves and who takes part", spec.rounds * bytes_per_round
        ),
        MemoryItem("batch_size", spec.batch_size, "the indices of a batch", batch),
    ]


def list_device_items(
    spec: ResolvedRunSpec,
    dataset: Dataset,
    signature: Signature,
    devices: Sequence[jax.Device],
    available_bytes: int | None,
) -> list[MemoryItem]:
    """List the items on every device: examples, one model, a batch of one lane."""
    images = dataset.train_images.nbytes
    # The first CPU device may read the host's own copy.
    copies = (len(devices) - 1) / len(devices) if _uses_host_memory(devices) else 1
    model, options = signature.training.task.model, dict(sorted(spec.model_options.items()))
    variables = jax.eval_shape(model.init, jax.random.key(0))
    name, value = ("network_options", options) if options else ("model", spec.model)
    batch = _compute_batch_bytes(model, variables, spec.batch_size, available_bytes)
    return [
        MemoryItem("dataset", dataset.name, "its training images", int(copies * images)),
        MemoryItem(name, value, "the network's parameters", num_bytes(variables)),
        MemoryItem("batch_size", spec.batch_size, "a batch of one lane", batch),
    ]


def _compute_batch_bytes(
    model: Model, variables: Any, batch_size: int, available_bytes: int | None
) -> int:
    """Return the bytes of a lane's batch: its indices, and the largest layer of a forward pass."""
    indices, micro_batch_size = 4 * batch_size, effective_batch_size(model, batch_size)
    num_values = micro_batch_size
    for size in model.input_shape:
        num_values *= size
    if (
        available_bytes is None
        or _MIN_ACTIVATION_FACTOR * _FLOAT_BYTES * num_values <= available_bytes
    ):
        return indices
    images = jax.ShapeDtypeStruct((micro_batch_size, *model.input_shape), jnp.float32)
    forward = partial(model.apply, train=True, key=jax.random.key(0))
    return indices + lower_bound_bytes(jax.make_jaxpr(forward)(variables, images))


def effective_batch_size(model: Model, batch_size: int) -> int:
    """Return the number of samples that a training step processes at once."""
    if model.micro_batch is None or batch_size <= model.micro_batch:
        return batch_size
    return min(
        batch_size, choose_micro_batch_size(batch_size, model.micro_batch), model.micro_batch
    )


# --- of what was planned -------------------------------------------------------------------------


def require_memory_for_plan(
    program: CompiledPrograms,
    spec: ResolvedRunSpec,
    schedulers: Sequence[Scheduler],
    client_state: str,
    placement: Placement,
) -> None:
    """Check the plan, before anything is placed.

    Args:
      program: the programs, with their plan.
      spec: the settings of one of the runs.
      schedulers: the scheduler of the rounds of the run, and of the tuning of clients' copies.
      client_state: the place of client states.
      placement: the bytes that may be used.

    Raises:
      InsufficientMemoryError: if the schedule of one round and the client states of one run do not
        fit.
    """
    assert program.plan.mesh is not None
    devices = list(program.plan.mesh.devices.flat)
    schedule_bytes = sum(scheduler.shape.num_bytes(spec.batch_size) for scheduler in schedulers)
    row_bytes = compute_client_state_bytes(program, spec)
    device_items = [
        MemoryItem("batch_size", spec.batch_size, "the schedule of a round", schedule_bytes)
    ]
    host_items = [
        device_items[0]._replace(num_bytes=2 * schedule_bytes)
    ]  # as it is made, and stacked
    if row_bytes and client_state == HOST_STATE:
        num_trained = len(schedulers[0].trained_work_ids(range(spec.rounds)))
        client_states = MemoryItem(
            "num_clients", spec.num_clients, "what clients keep", num_trained * row_bytes
        )
        host_items.append(client_states)
    elif row_bytes:
        alternative = "client_state='host'" if program.algorithm.can_page_state else ""
        client_states = MemoryItem(
            "num_clients", spec.num_clients, "what clients keep", 0, alternative
        )
        clients_per_device = spec.num_clients // (
            len(devices) if client_state == SPLIT_STATE else 1
        )
        device_items.append(client_states._replace(num_bytes=row_bytes * clients_per_device))
    _require_host_memory(host_items, devices)
    if _uses_host_memory(devices):
        device_items += _share_per_device(host_items, devices)
    require_memory(
        device_items,
        _get_available_bytes(placement, devices),
        _describe_memory_source(placement, devices),
    )


# --- of the programs -----------------------------------------------------------------------------


def require_memory_for_programs(
    programs: dict[str, tuple[Any, tuple]],
    program: CompiledPrograms,
    spec: ResolvedRunSpec,
    client_state: str,
    memory: int | None,
) -> None:
    """Trace and compile the programs of runs, and check the memory that they need.

    The traces and compiled programs are kept for when the programs run.

    Args:
      programs: the jitted programs with their inputs by name, see `GroupState.list_programs`.
      program: the record of the programs.
      spec: the settings of one of the runs.
      client_state: the place of client states.
      memory: bytes that they may use on each device (default: the free bytes).

    Raises:
      InsufficientMemoryError: if a program needs more.
    """
    available_bytes = memory or total_free_bytes(program.plan.devices)

    def check(name: str, required: int, qualifier: str = "") -> None:
        if available_bytes is None or required <= available_bytes:
            return
        fraction, lanes = available_bytes / required, program.plan.lanes
        batch_size = int(spec.batch_size * fraction)
        suggestions = [f"lanes = {max(1, int(lanes * fraction))}"] if lanes > 1 else []
        if can_page_client_states(program, spec, client_state):
            suggestions.append("client_state = 'host'")
        if batch_size >= 1:
            suggestions.append(f"batch_size = {batch_size}")
        raise InsufficientMemoryError(
            f"batch_size = {spec.batch_size!r}: the {name} of {spec.algorithm} need {qualifier}"
            f"{_format_bytes(required)} on each device, and {_format_bytes(available_bytes)} are "
            f"there: expected {', '.join([*suggestions, 'a smaller network'])} or more memory"
        )

    for name, (jitted, inputs) in programs.items():
        check(name, lower_bound_bytes(jitted.trace(*inputs).jaxpr), "at least ")
    for name, (jitted, inputs) in programs.items():
        required = compute_compiled_bytes(jitted, inputs)
        # What is there already is not free any more.
        check(name, required if memory else required - _count_placed_bytes(inputs))


def reduce_memory_use(
    program: CompiledPrograms, spec: ResolvedRunSpec, client_state: str, placement: Placement
) -> Placement | None:
    """Return a placement with less memory for runs that do not fit.

    Client states move to the host first, then the lanes are halved, as far as the user's
    `placement` leaves these open.

    Args:
      program: the programs, with their plan.
      spec: the settings of one of the runs.
      client_state: the place of client states.
      placement: the user's placement.

    Returns:
      The placement; None if nothing is left to reduce.
    """
    lanes = program.plan.lanes
    current = dataclasses.replace(placement, lanes=lanes, client_state=client_state)
    if placement.client_state == AUTO and can_page_client_states(program, spec, client_state):
        return dataclasses.replace(current, client_state=HOST_STATE)
    if placement.lanes == AUTO and lanes > 1:
        return dataclasses.replace(current, lanes=lanes // 2)
    return None


def can_page_client_states(
    program: CompiledPrograms, spec: ResolvedRunSpec, client_state: str
) -> bool:
    """Return whether there are client states on the devices that could be on the host."""
    is_pageable = program.algorithm.can_page_state and client_state != HOST_STATE
    return is_pageable and compute_client_state_bytes(program, spec) > 0


def _count_placed_bytes(inputs: Any) -> int:
    """Return the bytes of the inputs that are placed already, on each device."""
    arrays = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array)]
    return num_bytes([leaf.addressable_data(0) for leaf in arrays])


# --- of what fails all the same ------------------------------------------------------------------


@contextlib.contextmanager
def translate_out_of_memory(spec: ResolvedRunSpec) -> Iterator[None]:
    """Translate the errors of a process that runs out of memory into InsufficientMemoryError."""
    try:
        yield
    except MemoryError as error:
        raise InsufficientMemoryError(_format_out_of_memory(spec, error)) from error
    except jax.errors.JaxRuntimeError as error:
        if not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error)):
            raise
        raise InsufficientMemoryError(_format_out_of_memory(spec, error)) from error


def _format_out_of_memory(spec: ResolvedRunSpec, error: Exception) -> str:
    message = " ".join(str(error).split())[:120]
    return (
        f"memory: {spec.algorithm} with num_clients={spec.num_clients}, "
        f"batch_size={spec.batch_size} ran out of it ({message or 'no more is given'}): expected more "
        "memory, fewer lanes, a smaller batch_size, or client_state='host'"
    )


def _require_host_memory(items: Sequence[MemoryItem], devices: Sequence[jax.Device]) -> None:
    require_memory(items, min_over_processes(free_host_bytes(), devices), "are free on the host")


def _share_per_device(
    items: Sequence[MemoryItem], devices: Sequence[jax.Device]
) -> list[MemoryItem]:
    """Divide items on the host among the devices of this process."""
    count = len(local_devices(devices))
    return [item._replace(num_bytes=item.num_bytes // count) for item in items]


def _get_available_bytes(placement: Placement, devices: Sequence[jax.Device]) -> int | None:
    return placement.memory or total_free_bytes(devices)


def _describe_memory_source(placement: Placement, devices: Sequence[jax.Device]) -> str:
    per_device = " on each device" if len(devices) > 1 or not _uses_host_memory(devices) else ""
    return f"may be taken{per_device}" if placement.memory else f"are free{per_device}"


def _uses_host_memory(devices: Sequence[jax.Device]) -> bool:
    return devices[0].platform == "cpu"
