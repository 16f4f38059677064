"""Made-up work of the kind that is to be timed: clients that train or condense, and a server."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data import partition_from_clients
from fedjax_het.engine.contract import ClientMethod, Upload
from fedjax_het.engine.footprint import bytes_of_compiled, least_bytes
from fedjax_het.engine.lanes import Cohort, Examples, train_cohort
from fedjax_het.engine.local import Broadcast, LocalTraining, local_sgd, plain_sgd
from fedjax_het.engine.optimizers import OWN, Details, optimizer_numbers
from fedjax_het.engine.plan import make_plan
from fedjax_het.engine.schedule import Scheduler
from fedjax_het.engine.server import train_on_server
from fedjax_het.engine.sharing import Sharing
from fedjax_het.engine.task import Task
from fedjax_het.engine.units import ClientUnits

STEPS = 8  # per client and timing
SERVER_STEPS = 2  # of which one can take half a second
REPEATS = 3
ENOUGH_SECONDS = 1.0  # a timing that took so long is not repeated


class NoRoomToTime(Exception):
    """A program needs `needed` bytes on each device, and fewer are free."""

    def __init__(self, needed: int):
        super().__init__(f"{needed / 1e9:.2f} GB are needed")
        self.needed = needed


def seconds_per_step(
    training: LocalTraining,
    images: int | None,
    batch_size: int,
    devices: Sequence[jax.Device],
    lanes: int,
    clients: int,
    free: int | None,
) -> float:
    """What a client's step takes a device, of `clients` clients on each: as many for few lanes as
    for many, to be fair.

    images: that a pair of a client and a class condenses; None where clients train.
    free: bytes on each device. Raises NoRoomToTime, before anything runs, where it needs more.
    Cost: a compilation, and some calls.
    """
    plan, task = make_plan(lanes, devices), training.task
    model = task.model
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
    shown = rng.integers(0, 256, (clients * each, *model.input_shape), dtype=np.uint8)
    labels = rng.integers(0, model.num_classes, clients * each)
    if images is None:
        method, hp = local_sgd(_usual(training)), _numbers(training)
    else:
        method, hp = _condensing(task, images), {}

    def run(hp, variables, key, cohort):
        return train_cohort(method, plan, hp, Broadcast(variables), (), key, cohort).upload

    examples = Examples(shown, np.asarray(labels, np.int32))
    variables = jax.jit(model.init)(jax.random.key(0))
    inputs = (hp, variables, jax.random.key(1), Cohort(scheduler.round(0), examples))
    program = jax.jit(run)
    _require_room(least_bytes(program.trace(*inputs).jaxpr), free)
    placed = plan.put(inputs)
    compiled = program.lower(*placed).compile()
    _require_room(bytes_of_compiled(compiled), free)
    return _best_of(compiled, placed) / (clients * STEPS)


def _require_room(needed: int, free: int | None) -> None:
    if free is not None and needed > free:
        raise NoRoomToTime(needed)


def _usual(training: LocalTraining) -> LocalTraining:
    """Local training without what is the run's own, which costs a step little."""
    if training.optimizer == OWN:
        return plain_sgd(training)
    return training._replace(keep_state=False, details=Details())


def _numbers(training: LocalTraining) -> dict[str, Any]:
    optimizer = _usual(training).optimizer
    assert optimizer is not None
    numbers = optimizer_numbers(optimizer)
    return {name: np.float32(number.default) for name, number in numbers.items()}


def _condensing(task: Task, images: int) -> ClientMethod:
    """A pair's images move towards a batch's mean embedding, as in distribution matching."""
    model = task.model
    embed = model.embed
    assert embed is not None  # methods that condense require it

    def begin(hp, broadcast, state, client):
        return jax.random.normal(client.key, (images, *model.input_shape))

    def step(hp, broadcast, local, batch, client, key):
        def mean(images):
            return embed(broadcast.variables, images, train=False)[0].mean(0)

        real = mean(task.normalise(batch.images))
        distance = lambda images: jnp.square(real - mean(images)).sum()  # noqa: E731
        value, gradient = jax.value_and_grad(distance)(local)
        return local - gradient, value

    def end(hp, broadcast, local, state, client):
        return Upload(sum=local.sum()), state, ()

    return ClientMethod(lambda hp, variables: (), begin, step, end)


def seconds_per_server_step(
    task: Task, batch_size: int, devices: Sequence[jax.Device], *, shared: bool
) -> float:
    """What a step of the server's training takes devices that share it, or do all of it alike."""
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
