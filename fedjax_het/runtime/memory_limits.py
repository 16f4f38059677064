"""Lower bounds of the memory that runs need, checked before it is allocated.

The bounds are checked three times. Settings are checked before anything is timed or placed, and the
plan before data are placed. Programs, traced and then compiled, are checked before the first round.
A lower bound refuses no run that would fit.
"""

import contextlib
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.memory import (
    free_host_bytes,
    local_devices,
    lower_bound_bytes,
    min_over_processes,
    total_free_bytes,
)
from fedjax_het.core.schedule import Scheduler
from fedjax_het.data import Dataset
from fedjax_het.nn import Model
from fedjax_het.nn.micro_batch import choose_micro_batch_size
from fedjax_het.nn.model import USER_NETWORK
from fedjax_het.runtime.compiled_programs import CompiledPrograms
from fedjax_het.runtime.placement import (
    DISK_STATE,
    HOST_DATA,
    HOST_STATE,
    PAGED_STATES,
    SPLIT_STATE,
    Placement,
)
from fedjax_het.runtime.signature import Signature, to_items
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.cohorts import compute_cohort_size
from fedjax_het.utils.errors import ConfigError, display_name, summarize_error

_FLOAT_BYTES = 4
# Activations of a batch are counted if this many times the inputs do not fit.
_MIN_ACTIVATION_FACTOR = 2**14


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
    bytes_by_setting: dict[str, int] = {}
    for item in items:
        bytes_by_setting[item.setting] = bytes_by_setting.get(item.setting, 0) + item.num_bytes
    largest = max(items, key=lambda item: (bytes_by_setting[item.setting], item.num_bytes))
    setting_bytes, value = bytes_by_setting[largest.setting], largest.setting_value
    fraction = max(0, available_bytes - (required - setting_bytes)) / setting_bytes
    max_value = int(value * fraction) if isinstance(value, int) else 0
    if max_value >= 1:
        expected = f"at most {max_value}"
    elif fraction > 0:
        expected = f"a value that takes at most {format_bytes(int(fraction * largest.num_bytes))}"
    else:
        expected = "more memory"
    expected += f", or {largest.alternative}" if largest.alternative else ""
    raise InsufficientMemoryError(
        f"{largest.setting} = {value!r}: expected {expected}, as the run needs at least "
        f"{format_bytes(required)}, {format_bytes(setting_bytes)} of it for "
        f"{largest.description}, and {format_bytes(available_bytes)} {location}"
    )


def format_bytes(byte_count: int) -> str:
    """Return a number of bytes as text."""
    return f"{byte_count / 1e9:.2f} GB" if byte_count >= 1e7 else f"{byte_count / 1e6:.3f} MB"


def _require_host_and_device_memory(
    host_items: list[MemoryItem],
    device_items: list[MemoryItem],
    placement: Placement,
    devices: Sequence[jax.Device],
) -> None:
    """Require that items fit on the host and on every device; CPU devices share the host's memory.

    Raises:
      InsufficientMemoryError: if they do not fit.
    """
    host_bytes, is_shared = free_host_bytes(), _uses_host_memory(devices)
    require_memory(host_items, min_over_processes(host_bytes, devices), "are free on the host")
    if is_shared:
        num_devices = len(local_devices(devices))
        host_items = [i._replace(num_bytes=i.num_bytes // num_devices) for i in host_items]
        device_items = device_items + host_items
    location = "may be taken" if placement.memory else "are free"
    location += " on each device" if len(devices) > 1 or not is_shared else ""
    require_memory(device_items, placement.memory or total_free_bytes(devices), location)


def _uses_host_memory(devices: Sequence[jax.Device]) -> bool:
    return devices[0].platform == "cpu"


def require_memory_for_settings(
    spec: ResolvedRunSpec,
    dataset: Dataset,
    signature: Signature,
    placement: Placement,
    devices: Sequence[jax.Device],
    client_data: str,
) -> None:
    """Check the settings, before a partition is made, a lane is timed or an example is placed.

    Args:
      spec: the settings of one of the runs.
      dataset: the data set.
      signature: the static choices of the runs.
      placement: the bytes that may be used.
      devices: the devices.
      client_data: the place of the clients' training examples.

    Raises:
      InsufficientMemoryError: if not even one run fits, in one lane.
    """
    curves_per_client = int(spec.has_client_tests) * (1 + (spec.validation is not None))
    num_curves = 4 + spec.num_clients * curves_per_client
    cohort_size = compute_cohort_size(spec.num_clients, spec.participation)
    curve_bytes = spec.rounds * (_FLOAT_BYTES * num_curves + 8 * cohort_size)
    batch_bytes = 2 * 4 * spec.batch_size  # a step's indices as they are drawn and as placed
    host_items = [
        MemoryItem("rounds", spec.rounds, "curves and participants", curve_bytes),
        MemoryItem("batch_size", spec.batch_size, "the indices of a batch", batch_bytes),
    ]
    available_bytes = placement.memory or total_free_bytes(devices)
    device_items = list_device_items(spec, dataset, signature, devices, available_bytes)
    if client_data == HOST_DATA:
        device_items = [item for item in device_items if item.setting != "dataset"]
    _require_host_and_device_memory(host_items, device_items, placement, devices)


def list_device_items(
    spec: ResolvedRunSpec,
    dataset: Dataset,
    signature: Signature,
    devices: Sequence[jax.Device],
    available_bytes: int | None,
) -> list[MemoryItem]:
    """List the items on every device: examples, one model, a batch of one lane.

    Args:
      spec: the settings of one of the runs.
      dataset: the data set.
      signature: the static choices of the runs.
      devices: the devices.
      available_bytes: bytes on each device; activations that certainly fit are not counted.

    Returns:
      The items.
    """
    # The first CPU device may read the host's own copy.
    copies = (len(devices) - 1) / len(devices) if _uses_host_memory(devices) else 1
    model, options = signature.training.task.model, dict(to_items(spec.model_options))
    variables = jax.eval_shape(model.init, make_key(0))
    own_bytes = num_bytes(jax.eval_shape(signature.network.init, make_key(0)))
    ratios = compare_with_defaults(spec.algorithm, spec.options)
    argument = "network" if spec.model == USER_NETWORK else "model"
    name, value = ("network_options", options) if options else (argument, spec.model)
    if ratios and num_bytes(variables) > 2 * own_bytes:  # the method adds most of the layers
        option = max(ratios, key=lambda name: ratios[name])
        name, value = display_name(f"options {option}"), spec.options[option]
    batch = _compute_batch_bytes(model, variables, spec.batch_size, available_bytes)
    input_bytes = int(copies * sum(array.nbytes for array in jax.tree.leaves(dataset.train_inputs)))
    return [
        MemoryItem("dataset", dataset.name, "its training inputs", input_bytes),
        MemoryItem(name, value, "the network's parameters", num_bytes(variables)),
        MemoryItem("batch_size", spec.batch_size, "a batch of one lane", batch),
    ]


def compare_with_defaults(algorithm: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratio of each whole-number option of a method to its default.

    Args:
      algorithm: name of the method.
      options: the method's options by name.

    Returns:
      The ratios by name; the value itself for a default of 0 or None.
    """
    defaults = get_algorithm_spec(algorithm, options).complete_options({})
    return {
        name: value / max(defaults.get(name) or 1, 1)
        for name, value in options.items()
        if type(value) is int
    }


def _compute_batch_bytes(
    model: Model, variables: Any, batch_size: int, available_bytes: int | None
) -> int:
    """Return the bytes of a lane's batch: its indices, and the largest layer of a forward pass."""
    num_samples = batch_size  # that a training step processes at once
    if model.micro_batch is not None and batch_size > model.micro_batch:
        micro_batch_size = choose_micro_batch_size(batch_size, model.micro_batch)
        num_samples = min(batch_size, micro_batch_size, model.micro_batch)
    inputs = jax.eval_shape(lambda: model.make_inputs(num_samples))
    input_bytes = _FLOAT_BYTES * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(inputs))
    if available_bytes is None or _MIN_ACTIVATION_FACTOR * input_bytes <= available_bytes:
        return 4 * batch_size
    forward = partial(model.apply, train=True, key=make_key(0))
    jaxpr = jax.make_jaxpr(forward)(variables, inputs)
    return 4 * batch_size + lower_bound_bytes(jaxpr)


def require_memory_for_plan(
    program: CompiledPrograms,
    spec: ResolvedRunSpec,
    schedulers: Sequence[Scheduler],
    client_state: str,
    state_bytes: int,
    placement: Placement,
) -> None:
    """Check the plan, before anything is placed.

    Args:
      program: the programs, with their plan.
      spec: the settings of one of the runs.
      schedulers: the scheduler of the rounds of the run, and of the tuning of clients' copies.
      client_state: the place of client states.
      state_bytes: bytes of the state of one client.
      placement: the bytes that may be used.

    Raises:
      InsufficientMemoryError: if the schedule of one round and the client states of one run do not
        fit.
    """
    devices, num_clients = program.plan.devices, spec.num_clients
    schedule_bytes = sum(scheduler.shape.num_bytes(spec.batch_size) for scheduler in schedulers)
    schedule = MemoryItem("batch_size", spec.batch_size, "the schedule of a round", schedule_bytes)
    device_items = [schedule]
    host_items = [schedule._replace(num_bytes=2 * schedule_bytes)]  # as it is made, and stacked
    if state_bytes:
        states = MemoryItem("num_clients", num_clients, "the states of clients", 0)
        if client_state in PAGED_STATES:
            num_trained = len(schedulers[0].trained_work_ids(range(spec.rounds)))
            states = states._replace(num_bytes=num_trained * state_bytes)
        if client_state == HOST_STATE:
            host_items.append(states._replace(alternative="client_state='disk'"))
        elif client_state == DISK_STATE:
            folder = tempfile.gettempdir()
            free_bytes = shutil.disk_usage(folder).free
            require_memory([states], free_bytes, f"are free in the folder {folder}")
        else:
            alternative = "client_state='host'" if program.algorithm.can_page_state else ""
            num_rows = num_clients // (len(devices) if client_state == SPLIT_STATE else 1)
            device_items.append(
                states._replace(num_bytes=state_bytes * num_rows, alternative=alternative)
            )
    _require_host_and_device_memory(host_items, device_items, placement, devices)


@contextlib.contextmanager
def translate_out_of_memory(spec: ResolvedRunSpec) -> Iterator[None]:
    """Translate the errors of a process that runs out of memory into InsufficientMemoryError."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = summarize_error(error, 120) or "no details"
        is_xla_error = isinstance(error, jax.errors.JaxRuntimeError)
        if is_xla_error and not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error)):
            raise
        ratios = compare_with_defaults(spec.algorithm, spec.options)
        option_texts = [
            f"{display_name(f'options {name}')} below {spec.options[name]}, "
            for name, ratio in ratios.items()
            if ratio > 1
        ]
        raise InsufficientMemoryError(
            f"memory: {spec.algorithm} with num_clients={spec.num_clients}, batch_size="
            f"{spec.batch_size} ran out of memory ({text}): expected {''.join(option_texts)}more "
            "memory, fewer lanes, a smaller batch_size, or client_state='host'"
        ) from error
