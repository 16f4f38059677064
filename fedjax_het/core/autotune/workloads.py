"""Made-up work of the kind that is to be timed: clients that train or condense, and a server."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.core.client_loop import Cohort, Examples, train_cohort
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.local_training import (
    LocalTraining,
    ServerMessage,
    make_local_sgd,
    with_plain_sgd,
)
from fedjax_het.core.memory import get_compiled_bytes, lower_bound_bytes
from fedjax_het.core.optimizers import USER_OBJECT, LocalTrainingOptions, optimizer_hyperparameters
from fedjax_het.core.schedule import Scheduler
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import train_on_server
from fedjax_het.core.task import Task
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import partition_from_clients

STEPS_PER_CLIENT = 8  # per client and timing
NUM_SERVER_STEPS = 2  # of which one can take half a second
NUM_REPEATS = 3
MAX_REPEAT_SECONDS = 1.0  # a timing that took so long is not repeated


class WorkloadMemoryError(Exception):
    """A program needs `needed` bytes on each device, and fewer are free."""

    def __init__(self, needed_bytes: int):
        super().__init__(f"{needed_bytes / 1e9:.2f} GB are needed")
        self.needed_bytes = needed_bytes


def time_client_step(
    training: LocalTraining,
    images_per_pair: int | None,
    batch_size: int,
    devices: Sequence[jax.Device],
    num_lanes: int,
    num_clients: int,
    free_bytes: int | None,
) -> float:
    """What a client's step takes a device, of `clients` clients on each: as many for few lanes as
    for many, to be fair.

    images: that a pair of a client and a class condenses; None where clients train.
    free: bytes on each device. Raises WorkloadMemoryError, before anything runs, where it needs more.
    Cost: a compilation, and some calls.
    """
    plan, task = make_execution_plan(num_lanes, devices), training.task
    model = task.model
    num_clients, samples_per_client = plan.blocks * num_clients, STEPS_PER_CLIENT * batch_size
    partition = partition_from_clients(
        [
            np.arange(k * samples_per_client, (k + 1) * samples_per_client)
            for k in range(num_clients)
        ]
    )
    scheduler = Scheduler(
        partition,
        ClientWork(partition, 1, batch_size),
        seed=0,
        num_rounds=1,
        participation=1.0,
        averaging="uniform",
        eval_every=1,
        blocks=plan.blocks,
        lanes=num_lanes,
    )
    rng = np.random.default_rng(0)
    images = rng.integers(
        0, 256, (num_clients * samples_per_client, *model.input_shape), dtype=np.uint8
    )
    labels = rng.integers(0, model.num_classes, num_clients * samples_per_client)
    if images_per_pair is None:
        client_algorithm, hp = (
            make_local_sgd(_with_default_options(training)),
            _default_hyperparameter_values(training),
        )
    else:
        client_algorithm, hp = _make_condensing_client(task, images_per_pair), {}

    def train_clients(hp, variables, key, cohort):
        return train_cohort(
            client_algorithm, plan, hp, ServerMessage(variables), (), key, cohort
        ).update

    examples = Examples(images, np.asarray(labels, np.int32))
    variables = jax.jit(model.init)(jax.random.key(0))
    inputs = (hp, variables, jax.random.key(1), Cohort(scheduler.make_round(0), examples))
    program = jax.jit(train_clients)
    _require_memory(lower_bound_bytes(program.trace(*inputs).jaxpr), free_bytes)
    placed_inputs = plan.put(inputs)
    compiled = program.lower(*placed_inputs).compile()
    _require_memory(get_compiled_bytes(compiled), free_bytes)
    return _time_fastest_call(compiled, placed_inputs) / (num_clients * STEPS_PER_CLIENT)


def _require_memory(needed_bytes: int, free_bytes: int | None) -> None:
    if free_bytes is not None and needed_bytes > free_bytes:
        raise WorkloadMemoryError(needed_bytes)


def _with_default_options(training: LocalTraining) -> LocalTraining:
    """Local training without what is the run's own, which costs a step little."""
    if training.optimizer == USER_OBJECT:
        return with_plain_sgd(training)
    return training._replace(keep_state=False, options=LocalTrainingOptions())


def _default_hyperparameter_values(training: LocalTraining) -> dict[str, Any]:
    optimizer = _with_default_options(training).optimizer
    assert optimizer is not None
    hyperparameters = optimizer_hyperparameters(optimizer)
    return {
        name: np.float32(hyperparameter.default) for name, hyperparameter in hyperparameters.items()
    }


def _make_condensing_client(task: Task, images_per_pair: int) -> ClientAlgorithm:
    """A pair's images move towards a batch's mean embedding, as in distribution matching."""
    model = task.model
    embed = model.embed
    assert embed is not None  # methods that condense require it

    def begin(context, state):
        return jax.random.normal(context.key, (images_per_pair, *model.input_shape))

    def step(context, local, batch):
        def mean(images):
            return embed(context.message.variables, images, train=False)[0].mean(0)

        real = mean(task.normalize(batch.images))
        distance = lambda images: jnp.square(real - mean(images)).sum()  # noqa: E731
        value, gradient = jax.value_and_grad(distance)(local)
        return local - gradient, value

    def end(context, local, state):
        return ClientUpdate(sum=local.sum()), state, ()

    return ClientAlgorithm(lambda hp, variables: (), begin, step, end)


def time_server_step(
    task: Task, batch_size: int, devices: Sequence[jax.Device], *, is_sharded: bool
) -> float:
    """What a step of the server's training takes devices that share it, or do all of it alike."""
    plan, model = make_execution_plan(1, devices, has_sharded_server=is_sharded), task.model
    rng, num_images = np.random.default_rng(0), NUM_SERVER_STEPS * batch_size
    images = rng.integers(0, 256, (num_images, *model.input_shape), dtype=np.uint8)
    labels = rng.integers(0, model.num_classes, num_images).astype(np.int32)

    def train(server_parallelism: ServerParallelism, variables, examples, key):
        return train_on_server(
            task,
            variables,
            examples,
            key,
            batch_size=batch_size,
            lr=0.01,
            epochs=1,
            server_parallelism=server_parallelism,
        )

    variables = jax.jit(model.init)(jax.random.key(0))
    examples = Examples(jnp.asarray(images), jnp.asarray(labels))
    inputs = plan.put((variables, examples, jax.random.key(1)))
    return (
        _time_fastest_call(jax.jit(lambda *args: plan.shard_server_work(train, *args)), inputs)
        / NUM_SERVER_STEPS
    )


def _time_fastest_call(program: Callable, inputs: tuple) -> float:
    """Seconds of the fastest of some calls, compilation apart."""
    call_seconds: list[float] = []
    jax.block_until_ready(program(*inputs))
    while len(call_seconds) < NUM_REPEATS and sum(call_seconds) < MAX_REPEAT_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        call_seconds.append(time.perf_counter() - start)
    return min(call_seconds)
