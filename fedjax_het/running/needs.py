"""What runs need of memory, at least, before it is asked for: they are refused with the numbers
where there is less.

Three times, each as early as it can be known: of the settings, before anything is timed or placed
(`require_room`); of the programs as they were traced, before they are compiled, and of the compiled
ones, before the first round (`require_room_for_programs`). All are of what cannot be done without,
so that no run is refused that could have been made.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.building import num_bytes
from fedjax_het.common.errors import ConfigError
from fedjax_het.data import Dataset
from fedjax_het.engine.footprint import compiled_bytes, least_bytes
from fedjax_het.engine.memory import (
    all_free_bytes,
    free_ram,
    least_of_processes,
    own_devices,
)
from fedjax_het.engine.schedule import cohort_size
from fedjax_het.nn import Model
from fedjax_het.nn.micro_batch import piece_size
from fedjax_het.running.federations import Federation
from fedjax_het.running.placement import AUTO, HOST_STATE, SPLIT_STATE, Placement
from fedjax_het.running.programs import Program, Signature, client_state_bytes, training_of
from fedjax_het.settings.spec import ResolvedSpec

if TYPE_CHECKING:
    from fedjax_het.running.runs import Runs

_FLOAT = 4  # bytes
_TRACED_FROM = 2**14  # a batch whose activations could matter: images times so much are not free


class NoRoom(ConfigError):
    """A run needs more memory than there is."""


class Part(NamedTuple):
    """Something that takes memory.

    argument, value: the setting that it grows with. what: it is, in words. num_bytes: on each
    device, or on the host. instead: what else would help.
    """

    argument: str
    value: Any
    what: str
    num_bytes: int
    instead: str = ""


def require_room(parts: Sequence[Part], free: int | None, where: str) -> None:
    """Raise NoRoom, which names the largest part, if these take more than `free` bytes.

    where: the memory is, as in "are free on each device".
    """
    needed = sum(part.num_bytes for part in parts)
    if free is None or needed <= free:
        return
    grow: dict[str, int] = {}  # with each argument
    for part in parts:
        grow[part.argument] = grow.get(part.argument, 0) + part.num_bytes
    largest = max(parts, key=lambda part: (grow[part.argument], part.num_bytes))
    own = grow[largest.argument]
    share = max(0, free - (needed - own)) / own
    raise NoRoom(
        f"{largest.argument} = {largest.value!r}: expected {_smaller(largest, share)}, as the run "
        f"needs at least {_gigabytes(needed)}, {_gigabytes(own)} of it for {largest.what}, and "
        f"{_gigabytes(free)} {where}"
    )


def _smaller(part: Part, share: float) -> str:
    """What of a part would fit, if this share of it does."""
    fits = int(part.value * share) if isinstance(part.value, int) else 0
    if fits >= 1:
        words = f"at most {fits}"
    elif share > 0:
        words = f"one that takes at most {_gigabytes(int(share * part.num_bytes))}"
    else:
        words = "more memory"
    return f"{words}, or {part.instead}" if part.instead else words


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"


# --- of the settings -----------------------------------------------------------------------------


def require_room_for_settings(
    spec: ResolvedSpec,
    dataset: Dataset,
    signature: Signature,
    placement: Placement,
    devices: Sequence[jax.Device],
) -> None:
    """Before a partition or a schedule is made, a lane is timed or an example placed: raise NoRoom
    if not even one run fits by itself, in one lane."""
    of_host = host_parts(spec)
    _require_room_on_host(of_host, devices)
    free = _free(placement, devices)
    of_device = device_parts(spec, dataset, signature, devices, free)
    if _shares_ram(devices):
        of_device += _shared(of_host, devices)
    require_room(of_device, free, _where(placement, devices))


def host_parts(spec: ResolvedSpec) -> list[Part]:
    """What the host keeps of all rounds: their curves, and who takes part in them."""
    curves = 4 + (spec.num_clients if spec.tests_clients else 0)
    each = _FLOAT * curves + 8 * cohort_size(spec.num_clients, spec.participation)
    batch = 2 * 4 * spec.batch_size  # a step's indices, as they are drawn and as they are placed
    return [
        Part("rounds", spec.rounds, "curves and who takes part", spec.rounds * each),
        Part("batch_size", spec.batch_size, "the indices of a batch", batch),
    ]


def device_parts(
    spec: ResolvedSpec,
    dataset: Dataset,
    signature: Signature,
    devices: Sequence[jax.Device],
    free: int | None,
) -> list[Part]:
    """What every device holds: examples, one model, a batch in one lane."""
    images = dataset.train_images.nbytes
    # The first CPU device may read the host's own copy.
    copies = (len(devices) - 1) / len(devices) if _shares_ram(devices) else 1
    model = training_of(signature).task.model
    variables = jax.eval_shape(model.init, jax.random.key(0))
    options = dict(signature.model_options)
    name, value = ("network_options", options) if options else ("model", signature.model)
    batch = _batch_bytes(model, variables, spec.batch_size, free)
    return [
        Part("dataset", dataset.name, "its training images", int(copies * images)),
        Part(name, value, "the network's parameters", num_bytes(variables)),
        Part("batch_size", spec.batch_size, "a batch of one lane", batch),
    ]


def _batch_bytes(model: Model, variables: Any, batch_size: int, free: int | None) -> int:
    """What a lane's batch takes: its indices, and the largest layer of a forward pass."""
    indices, at_once = 4 * batch_size, piece_size_of(model, batch_size)
    values = at_once
    for size in model.input_shape:
        values *= size
    if free is None or _TRACED_FROM * _FLOAT * values <= free:
        return indices
    images = jax.ShapeDtypeStruct((at_once, *model.input_shape), jnp.float32)
    forward = partial(model.apply, train=True, key=jax.random.key(0))
    return indices + least_bytes(jax.make_jaxpr(forward)(variables, images))


def piece_size_of(model: Model, batch_size: int) -> int:
    """How many samples a training step takes at once."""
    if model.micro_batch is None or batch_size <= model.micro_batch:
        return batch_size
    return min(batch_size, piece_size(batch_size, model.micro_batch), model.micro_batch)


# --- of what was planned -------------------------------------------------------------------------


def require_room_for_plan(
    program: Program, federation: Federation, client_state: str, placement: Placement
) -> None:
    """Before anything is placed: raise NoRoom if the schedule of one round, and what all clients of
    one run keep, do not fit."""
    assert program.plan.mesh is not None
    devices, spec = list(program.plan.mesh.devices.flat), federation.spec
    planned = [s for s in (federation.scheduler, federation.tuning) if s is not None]
    batches = sum(scheduler.shape.num_bytes(spec.batch_size) for scheduler in planned)
    row = client_state_bytes(program, spec)
    of_device = [Part("batch_size", spec.batch_size, "the schedule of a round", batches)]
    of_host = [of_device[0]._replace(num_bytes=2 * batches)]  # as it is made, and stacked
    if row and client_state == HOST_STATE:
        trained = len(federation.scheduler.trained(range(spec.rounds)))
        kept = Part("num_clients", spec.num_clients, "what clients keep", trained * row)
        of_host.append(kept)
    elif row:
        other = "client_state='host'" if program.algorithm.pageable else ""
        kept = Part("num_clients", spec.num_clients, "what clients keep", 0, other)
        held = spec.num_clients // (len(devices) if client_state == SPLIT_STATE else 1)
        of_device.append(kept._replace(num_bytes=row * held))
    _require_room_on_host(of_host, devices)
    if _shares_ram(devices):
        of_device += _shared(of_host, devices)
    require_room(of_device, _free(placement, devices), _where(placement, devices))


# --- of the programs -----------------------------------------------------------------------------


def require_room_for_programs(runs: "Runs", memory: int | None) -> None:
    """Raise NoRoom if a program of these runs, which this traces and then compiles, needs more than
    `memory`, or than is free.

    Cost: none, as what was traced and compiled is kept for when the programs run.
    """
    assert runs.plan.mesh is not None
    devices = list(runs.plan.mesh.devices.flat)
    free = memory or all_free_bytes(devices)
    programs = runs.programs()
    for name, (program, inputs) in programs.items():
        least = least_bytes(program.trace(*inputs).jaxpr)
        _require_room_for_program(runs, name, least, free, "at least ")
    for name, (program, inputs) in programs.items():
        needed = compiled_bytes(program, inputs)
        if memory is None:  # what is there already is not free any more
            needed -= _placed_bytes(inputs)
        _require_room_for_program(runs, name, needed, free, "")


def _require_room_for_program(
    runs: "Runs", name: str, needed: int, free: int | None, least: str
) -> None:
    if free is None or needed <= free:
        return
    spec, lanes, share = runs.federations[0].spec, runs.plan.lanes, free / needed
    helps = [f"lanes = {max(1, int(lanes * share))}"] if lanes > 1 else []
    if _could_page(runs):
        helps.append("client_state = 'host'")
    if int(spec.batch_size * share) >= 1:
        helps.append(f"batch_size = {int(spec.batch_size * share)}")
    raise NoRoom(
        f"batch_size = {spec.batch_size!r}: the {name} of {spec.algorithm} need {least}"
        f"{_gigabytes(needed)} on each device, and {_gigabytes(free)} are there: expected "
        f"{', '.join([*helps, 'a smaller network'])} or more memory"
    )


def smaller(runs: "Runs", placement: Placement) -> Placement | None:
    """Where runs that found no room may have some, as far as the `placement` that was asked for
    leaves it open: with what clients keep on the host, then with half the lanes; None where
    nothing is left."""
    lanes = runs.plan.lanes
    here = dataclasses.replace(placement, lanes=lanes, client_state=runs.group.client_state)
    if placement.client_state == AUTO and _could_page(runs):
        return dataclasses.replace(here, client_state=HOST_STATE)
    if placement.lanes == AUTO and lanes > 1:
        return dataclasses.replace(here, lanes=lanes // 2)
    return None


def _could_page(runs: "Runs") -> bool:
    """Whether what clients keep, if anything, is on the devices and need not be."""
    pageable = runs.algorithm.pageable and not runs.paged
    return pageable and client_state_bytes(runs.group.program, runs.federations[0].spec) > 0


def _placed_bytes(inputs: Any) -> int:
    """Of arrays that are there, on each device."""
    there = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array)]
    return num_bytes([leaf.addressable_data(0) for leaf in there])


# --- of what fails all the same ------------------------------------------------------------------


@contextlib.contextmanager
def told_in_one_line(spec: ResolvedSpec) -> Iterator[None]:
    """What runs out of memory all the same, in one line."""
    try:
        yield
    except MemoryError as error:
        raise NoRoom(_one_line(spec, error)) from error
    except jax.errors.JaxRuntimeError as error:
        if not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error)):
            raise
        raise NoRoom(_one_line(spec, error)) from error


def _one_line(spec: ResolvedSpec, error: Exception) -> str:
    said = " ".join(str(error).split())[:120]
    return (
        f"memory: {spec.algorithm} with num_clients={spec.num_clients}, "
        f"batch_size={spec.batch_size} ran out of it ({said or 'no more is given'}): expected more "
        "memory, fewer lanes, a smaller batch_size, or client_state='host'"
    )


def _require_room_on_host(parts: Sequence[Part], devices: Sequence[jax.Device]) -> None:
    require_room(parts, least_of_processes(free_ram(), devices), "are free on the host")


def _shared(parts: Sequence[Part], devices: Sequence[jax.Device]) -> list[Part]:
    """What each of a process's devices has of the host's."""
    count = len(own_devices(devices))
    return [part._replace(num_bytes=part.num_bytes // count) for part in parts]


def _free(placement: Placement, devices: Sequence[jax.Device]) -> int | None:
    return placement.memory or all_free_bytes(devices)


def _where(placement: Placement, devices: Sequence[jax.Device]) -> str:
    each = " on each device" if len(devices) > 1 or not _shares_ram(devices) else ""
    return f"may be taken{each}" if placement.memory else f"are free{each}"


def _shares_ram(devices: Sequence[jax.Device]) -> bool:
    return devices[0].platform == "cpu"
