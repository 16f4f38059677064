"""How many lanes to run on each device, by which convolutions, and whether devices share the
server's work: short timings, remembered.

On a CPU one flat lane per core usually wins; on an accelerator many vmapped lanes do. Which, and
how many, depends on the network and the chip, so each candidate trains a few steps, once. What the
timings say of a step is then weighed with the steps that a run's own clients make of so many lanes.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jaxlib
import numpy as np

from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.memory import all_free_bytes
from fedjax_het.engine.task import Task
from fedjax_het.engine.timed_work import (
    SERVER_STEPS,
    STEPS,
    NoRoomToTime,
    seconds_per_server_step,
    seconds_per_step,
)
from fedjax_het.engine.timings import Timing, recall, remember
from fedjax_het.nn.computing import computed, leaves_convolutions_open
from fedjax_het.nn.conv_products import AUTO, CONV_IMPLS, IM2COL, NATIVE, UNROLLED

log = logging.getLogger("fedjax_het")

MARGIN = 0.9  # more lanes must take less than this share of the time that fewer take
MOST_PAIRS = 64  # lanes of pairs that are tried: each holds a batch's activations
MOST_UNROLLED = 8  # lanes: the program grows with them
CLIENTS, CLIENTS_OF_CPU, PAIRS = 32, 4, 4  # that a device goes through in a timing, at least
SPARE = 1.25  # of the memory in which a candidate failed: it is tried again where there is more


class LaneChoice(NamedTuple):
    """`seconds[v]` is the time per client step with v lanes on each device; empty if not timed."""

    lanes: int  # of one federation
    width: int  # federations whose lanes are side by side on a device
    seconds: dict[int, float]
    conv_impl: str = AUTO  # what convolutions that leave it open are computed by


class Way(NamedTuple):
    """A candidate."""

    lanes: int
    conv_impl: str

    @property
    def name(self) -> str:
        return f"{self.lanes} {self.conv_impl}"


class Work(NamedTuple):
    """What is timed: the steps of clients that train, or of pairs that condense.

    label: the network, and whatever else a step's time depends on besides optimiser and batch.
    images: that a pair of a client and a class condenses; None where clients train.
    """

    training: LocalTraining
    batch_size: int
    label: str
    images: int | None = None

    def name(self, devices: Sequence[jax.Device]) -> str:
        """As the table has it."""
        kind = self.training.optimizer if self.images is None else f"pairs of {self.images}"
        of = (jaxlib.__version__, self.label, kind, f"batch {self.batch_size}")
        return "|".join(map(str, (*of, f"{len(devices)} devices", f"{STEPS} steps")))

    @property
    def units(self) -> int:
        """Clients, or pairs, of each device in a timing, at least."""
        if jax.default_backend() == "cpu":
            return CLIENTS_OF_CPU
        return CLIENTS if self.images is None else PAIRS


def candidates(devices: int, cohort_size: int, federations: int = 1) -> list[int]:
    """Numbers of lanes per device worth a try, of as many federations as there are."""
    most = max(1, -(-cohort_size // devices))
    if jax.default_backend() == "cpu":
        return [v for v in (1, 4) if v <= most]
    most *= -(-federations // devices)
    powers = [4**i for i in range(8) if 4**i < most]
    return [*powers, most]


def convolutions(lanes: int, *, are_open: bool) -> list[str]:
    """Ways to compute convolutions worth a try under so many lanes. A CPU chooses for each product;
    elsewhere than on a TPU a native one of several lanes is a grouped one, which is slow."""
    backend = jax.default_backend()
    if not are_open or backend == "cpu":
        return [AUTO]
    if lanes == 1 or backend == "tpu":
        return [NATIVE, IM2COL]
    return [IM2COL, UNROLLED] if lanes <= MOST_UNROLLED else [IM2COL]


def choose_lanes(
    work: Work,
    *,
    devices: Sequence[jax.Device],
    cohort_size: int,
    federations: int = 1,
    waiting: Callable[[int], float] = lambda lanes: 1.0,
    memory: int | None = None,
) -> LaneChoice:
    """Time each candidate on made-up data, or recall what was found before.

    A device's lanes are those of one federation as far as its clients go round, then those of
    further federations: to the device, they are all the same. Candidates that do not fit, or fail,
    are left out; where all do, it is the fewest lanes, whose run then says what is wrong.

    Args:
      cohort_size: clients, or pairs, of a round.
      waiting: lanes of each block -> steps that they take for each step of the run's own clients,
        those of idle lanes included; 1 where none waits.
      memory: bytes on each device that may be taken (None: what is free).
    Cost: one compilation of local training per candidate, once. Processes that share the devices
      take the first one's word.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    given = (cohort_size, federations, waiting, memory)
    if len(local) == len(devices):
        return _choose(work, devices, *given)
    # Timings differ between processes, and programs that differ would wait for each other for ever.
    from jax.experimental import multihost_utils

    here = _choose(work, local, *given)
    own = np.array([here.lanes, here.width, CONV_IMPLS.index(here.conv_impl)])
    lanes, width, impl = map(int, multihost_utils.broadcast_one_to_all(own))
    return LaneChoice(lanes, width, here.seconds, CONV_IMPLS[impl])


def known_convolutions(work: Work, devices: Sequence[jax.Device], lanes: int) -> str:
    """What was found fastest for so many lanes, without timing anything."""
    known = recall(devices[0].device_kind, work.name(devices))
    found = {impl: known.get(Way(lanes, impl).name, Timing(None)).seconds for impl in CONV_IMPLS}
    timed = {impl: taken for impl, taken in found.items() if taken is not None}
    return min(timed, key=lambda impl: timed[impl], default=AUTO)


def _choose(work: Work, devices, cohort_size, federations, waiting, memory) -> LaneChoice:
    own = candidates(len(devices), cohort_size)
    tried = sorted({*own, *candidates(len(devices), cohort_size, federations)})
    if work.images is not None:
        own, tried = (sorted({min(v, MOST_PAIRS) for v in some}) for some in (own, tried))
    are_open = jax.default_backend() != "cpu" and leaves_convolutions_open(work.training.task.model)
    ways = [Way(v, c) for v in tried for c in convolutions(v, are_open=are_open)]
    if len(ways) == 1:
        return LaneChoice(ways[0].lanes, 1, {}, ways[0].conv_impl)
    timed, is_new = _timings(work, devices, ways, memory)
    seconds: dict[int, float] = {}
    impls: dict[int, str] = {}
    for way, taken in sorted(timed.items(), key=lambda item: -item[1]):  # the fastest stays
        seconds[way.lanes], impls[way.lanes] = taken, way.conv_impl
    fitting = [v for v in own if v in seconds]
    if not fitting:
        return LaneChoice(min(own), 1, {})
    # They do not depend on how many federations there are: a federation's numbers would.
    lanes = _fastest({v: seconds[v] * waiting(v) for v in fitting})
    most = _fastest({v: taken for v, taken in seconds.items() if v >= lanes})
    choice = LaneChoice(lanes, max(1, most // lanes), dict(sorted(seconds.items())), impls[most])
    if is_new:
        log.info(
            "lanes: %d per device, federations: %d, convolutions: %s (seconds per client step: %s)",
            *(choice.lanes, choice.width, choice.conv_impl, choice.seconds),
        )
    return choice


def _timings(
    work: Work, devices: Sequence[jax.Device], ways: Sequence[Way], memory: int | None
) -> tuple[dict[Way, float], bool]:
    """Seconds of those that fit, and whether any was timed now."""
    free = memory or all_free_bytes(devices)
    kind, name = devices[0].device_kind, work.name(devices)
    known = {way: timing for way, timing in recall(kind, name).items() if timing.holds(free)}
    new: dict[str, Timing] = {}
    too_many: dict[str, int] = {}  # lanes by implementation: more of them need more memory
    for way in sorted(ways):
        if way.lanes > too_many.get(way.conv_impl, math.inf):
            continue
        if way.name not in known:
            new[way.name] = _timing(work, devices, way, free)
        if {**known, **new}[way.name].seconds is None:
            too_many[way.conv_impl] = way.lanes
    if new:
        remember(kind, name, new)
    found = {way: {**known, **new}.get(way.name, Timing(None)).seconds for way in ways}
    return {way: taken for way, taken in found.items() if taken is not None}, bool(new)


def _timing(work: Work, devices: Sequence[jax.Device], way: Way, free: int | None) -> Timing:
    """Of one candidate, or why it is none."""
    task = work.training.task
    model = computed(task.model, conv_impl=way.conv_impl)
    training = work.training._replace(task=task._replace(model=model))
    clients = max(way.lanes, work.units)
    given = (training, work.images, work.batch_size, devices, way.lanes, clients, free)
    try:
        return Timing(seconds_per_step(*given))
    except NoRoomToTime as error:
        why, needed = str(error), error.needed - 1
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        why, needed = " ".join(str(error).split())[:120], int(SPARE * (free or 0))
    log.info("lanes: %d per device (convolutions: %s) are left out: %s", *way, why)
    return Timing(None, needed)


def choose_sharing(
    task: Task, *, batch_size: int, devices: Sequence[jax.Device], label: str
) -> bool:
    """Whether devices that share a federation should share the steps of its server, too.

    Times some steps of SGD on made-up data, alike on all devices and shared, or recalls what was
    found for `label` before. Cost: two compilations of a training step, once.
    """
    shares = task.model.spreads and len(devices) > 1
    here = all(device.process_index == jax.process_index() for device in devices)
    if not shares or not here:  # a collective every step is not for processes
        return False
    given = (jaxlib.__version__, label, "server", f"batch {batch_size}")
    name = "|".join(map(str, (*given, f"{len(devices)} devices", f"{SERVER_STEPS} steps")))
    kind = devices[0].device_kind
    ways = {"alone": 1, "shared": len(devices)}
    known = {way: timing for way, timing in recall(kind, name).items() if way in ways}
    if len(known) < len(ways):
        known = {
            way: Timing(seconds_per_server_step(task, batch_size, devices, shared=parts > 1))
            for way, parts in ways.items()
        }
        remember(kind, name, known)
        log.info("server's work by devices that do all of it or share it (seconds): %s", known)
    return _fastest({ways[way]: timing.seconds or 0.0 for way, timing in known.items()}) > 1


def _fastest(seconds: dict[int, float]) -> int:
    """The number of lanes that takes least, if it is clearly less than the fewest take."""
    best, fewest = min(seconds, key=lambda lanes: seconds[lanes]), min(seconds)
    return best if seconds[best] < MARGIN * seconds[fewest] else fewest
