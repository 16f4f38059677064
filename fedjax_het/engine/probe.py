"""How many lanes to run on each device, and whether devices share the server's work: short timings,
remembered.

On a CPU one flat lane per core usually wins; on an accelerator many vmapped lanes do. Which, and
how many, depends on the network and the chip, so each candidate trains a few steps, once.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from fedjax_het.common.cache import cache_root, private_folder
from fedjax_het.common.files import write_atomically
from fedjax_het.data import partition_from_clients
from fedjax_het.engine.lanes import Cohort, Examples, train_cohort
from fedjax_het.engine.local import Broadcast, LocalTraining, local_sgd, optimizer_numbers
from fedjax_het.engine.plan import make_plan
from fedjax_het.engine.schedule import Scheduler
from fedjax_het.engine.server import train_on_server
from fedjax_het.engine.sharing import Sharing
from fedjax_het.engine.task import Task
from fedjax_het.engine.units import ClientUnits

log = logging.getLogger("fedjax_het")

_FILE = "lanes.json"
STEPS = 8  # per client and timing
SERVER_STEPS = 2  # of which one can take half a second
REPEATS = 3
ENOUGH_SECONDS = 1.0  # a timing that took so long is not repeated
MARGIN = 0.9  # more lanes must take less than this share of the time that fewer take


class LaneChoice(NamedTuple):
    """`seconds[v]` is the time per client step with v lanes on each device; empty if not timed."""

    lanes: int  # of one federation
    width: int  # federations whose lanes are side by side on a device
    seconds: dict[int, float]


def candidates(devices: int, cohort_size: int, federations: int = 1) -> list[int]:
    """Numbers of lanes per device worth a try, of as many federations as there are."""
    most = max(1, -(-cohort_size // devices))
    if jax.default_backend() == "cpu":
        return [v for v in (1, 4) if v <= most]
    most *= -(-federations // devices)
    powers = [4**i for i in range(8) if 4**i < most]
    return [*powers, most]


def choose_lanes(
    training: LocalTraining,
    *,
    batch_size: int,
    devices: Sequence[jax.Device],
    cohort_size: int,
    federations: int = 1,
    label: str,
) -> LaneChoice:
    """Time each candidate on made-up data, or recall what was chosen for `label` before.

    A device's lanes are those of one federation as far as its clients go round, then those of
    further federations: to the device, they are all the same. `label` names what the answer depends
    on besides the devices and the batch; it is kept in the user's cache folder. Cost: one
    compilation of local training per candidate, once. Processes that share the devices take the
    first one's word.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    if len(local) == len(devices):
        return _choose(training, batch_size, devices, cohort_size, federations, label)
    # Timings differ between processes, and programs that differ would wait for each other for ever.
    from jax.experimental import multihost_utils

    here = _choose(training, batch_size, local, cohort_size, federations, label)
    agreed = multihost_utils.broadcast_one_to_all(np.array([here.lanes, here.width]))
    return LaneChoice(int(agreed[0]), int(agreed[1]), here.seconds)


def _choose(training, batch_size, devices, cohort_size, federations, label) -> LaneChoice:
    own = candidates(len(devices), cohort_size)
    tried = sorted({*own, *candidates(len(devices), cohort_size, federations)})
    if len(tried) == 1:
        return LaneChoice(tried[0], 1, {})
    given = (label, training.optimizer, batch_size, len(devices), devices[0].device_kind)
    name = "|".join(map(str, (*given, jaxlib.__version__, STEPS, own[-1])))
    known = {int(v): s for v, s in _recall().get(name, {}).items()}
    new = {
        v: _seconds_per_step(training, batch_size, devices, v, max(v, own[-1]))
        for v in tried
        if v not in known
    }
    seconds = {v: {**known, **new}[v] for v in tried}
    # A federation's lanes do not depend on how many federations there are: its numbers would.
    lanes = _fastest({v: seconds[v] for v in own})
    width = max(1, _fastest({v: seconds[v] for v in tried if v >= lanes}) // lanes)
    if new:
        _remember({**_recall(), name: {**known, **new}})
        log.info(
            "lanes: %d per device, federations: %d (seconds per client step: %s)",
            lanes,
            width,
            seconds,
        )
    return LaneChoice(lanes, width, seconds)


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
    given = ("server", label, batch_size, len(devices), devices[0].device_kind)
    name = "|".join(map(str, (*given, jaxlib.__version__, SERVER_STEPS)))
    known = {int(parts): taken for parts, taken in _recall().get(name, {}).items()}
    if not known:
        known = {
            parts: _seconds_per_server_step(task, batch_size, devices, shared=parts > 1)
            for parts in (1, len(devices))
        }
        _remember({**_recall(), name: known})
        log.info("server's work by the devices that share it (seconds per step): %s", known)
    return _fastest(known) > 1


def _seconds_per_server_step(
    task: Task, batch_size: int, devices: Sequence[jax.Device], *, shared: bool
) -> float:
    plan, model = make_plan(1, devices, shares_server=shared), task.model
    rng, count = np.random.default_rng(0), SERVER_STEPS * batch_size
    images = rng.integers(0, 256, (count, *model.input_shape), dtype=np.uint8)
    labels = rng.integers(0, model.num_classes, count).astype(np.int32)

    def learn(sharing: Sharing, variables, examples, key):
        return train_on_server(
            task,
            variables,
            examples,
            key,
            batch_size=batch_size,
            lr=0.01,
            epochs=1,
            sharing=sharing,
        )

    variables = jax.jit(model.init)(jax.random.key(0))
    examples = Examples(jnp.asarray(images), jnp.asarray(labels))
    inputs = plan.put((variables, examples, jax.random.key(1)))
    return _best_of(jax.jit(lambda *args: plan.shared(learn, *args)), inputs) / SERVER_STEPS


def _best_of(program: Callable, inputs: tuple) -> float:
    """Seconds of the fastest of some calls, compilation apart."""
    taken: list[float] = []
    jax.block_until_ready(program(*inputs))
    while len(taken) < REPEATS and sum(taken) < ENOUGH_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        taken.append(time.perf_counter() - start)
    return min(taken)


def _fastest(seconds: dict[int, float]) -> int:
    """The number of lanes that takes least, if it is clearly less than the fewest take."""
    best, fewest = min(seconds, key=lambda lanes: seconds[lanes]), min(seconds)
    return best if seconds[best] < MARGIN * seconds[fewest] else fewest


def _seconds_per_step(
    training: LocalTraining,
    batch_size: int,
    devices: Sequence[jax.Device],
    lanes: int,
    clients: int,
) -> float:
    """Of `clients` clients on each device: as many for few lanes as for many, to be fair."""
    plan, model = make_plan(lanes, devices), training.task.model
    clients, each = plan.blocks * clients, STEPS * batch_size
    partition = partition_from_clients(
        [np.arange(k * each, (k + 1) * each) for k in range(clients)]
    )
    scheduler = Scheduler(
        partition,
        ClientUnits(partition, 1, batch_size),
        seed=0,
        rounds=1,
        participation=1.0,
        averaging="uniform",
        eval_every=1,
        blocks=plan.blocks,
        lanes=lanes,
    )
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (clients * each, *model.input_shape), dtype=np.uint8)
    labels = rng.integers(0, model.num_classes, clients * each)
    assert training.optimizer is not None  # lanes of clients that condense are not timed
    hp = {
        name: jnp.float32(number.default)
        for name, number in optimizer_numbers(training.optimizer).items()
    }
    method = local_sgd(training._replace(keep_state=False))

    def run(hp, variables, key, cohort):
        return train_cohort(method, plan, hp, Broadcast(variables), (), key, cohort).upload

    inputs = plan.put(
        (
            hp,
            jax.jit(model.init)(jax.random.key(0)),
            jax.random.key(1),
            Cohort(
                scheduler.round(0), Examples(jnp.asarray(images), jnp.asarray(labels, jnp.int32))
            ),
        )
    )
    return _best_of(jax.jit(run), inputs) / (clients * STEPS)


def _recall() -> dict:
    try:
        return json.loads((cache_root() / _FILE).read_text())
    except (OSError, ValueError):
        return {}


def _remember(known: dict) -> None:
    try:
        text = json.dumps(known, indent=1).encode()
        write_atomically(private_folder() / _FILE, lambda file: file.write(text), private=True)
    except OSError as error:  # then it is timed again next time
        log.info("the choice of lanes is not remembered: %s", error)
