"""A federation made ready: settings checked, data placed, programs built but not compiled."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.algorithms.base import Algorithm
from fedjax_het.data import Dataset, Partition, PartitionSummary, load_dataset, make_partition
from fedjax_het.engine.guard import CheckedProgram
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan, make_plan
from fedjax_het.engine.probe import LaneChoice, choose_lanes
from fedjax_het.engine.randomness import Stream, device_key
from fedjax_het.engine.rounds import ChunkInputs, RoundMetrics, make_chunk
from fedjax_het.engine.schedule import Scheduler, cohort_size
from fedjax_het.engine.task import Task
from fedjax_het.errors import require
from fedjax_het.evaluation import evaluation_set
from fedjax_het.nn import make_model
from fedjax_het.spec import RunSpec

log = logging.getLogger("fedjax_het")


class Program(NamedTuple):
    """What runs of one static signature share: one compilation serves all of them."""

    task: Task
    plan: Plan
    algorithm: Algorithm
    init: Callable  # (hp, key, num_clients) -> State, jitted
    chunk: CheckedProgram
    host_work: dict[str, CheckedProgram]


@functools.lru_cache(maxsize=32)
def _training(signature: "_Signature") -> LocalTraining:
    s = signature
    model = make_model(s.model, s.input_shape, s.num_classes, **dict(s.model_options))
    return LocalTraining(Task(model, s.mean, s.std), s.optimizer, s.local_epochs, s.keep_state)


@functools.lru_cache(maxsize=32)
def _program(signature: "_Signature", devices: int, lanes: int) -> Program:
    training, plan = _training(signature), make_plan(lanes, devices)
    build, task = ALGORITHMS[signature.algorithm].build, training.task
    algorithm = build(training, plan, **dict(signature.options))
    chunk = CheckedProgram(
        make_chunk(algorithm, task, plan),
        baseline=lambda args: (args[0], RoundMetrics(*[0.0] * len(RoundMetrics._fields))),
        name=f"{signature.algorithm} rounds",
        donate_argnums=0,
    )
    works = {
        work.name: CheckedProgram(
            work.advance, baseline=lambda args: args[1], name=work.name, donate_argnums=1
        )
        for work in algorithm.host_work
    }

    def init(hp, key, num_clients):
        state = algorithm.init(hp, key, task.model.init(key), num_clients)
        # A weakly typed leaf would come back strong, and the next call would compile again.
        return jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), state)

    return Program(task, plan, algorithm, jax.jit(init, static_argnums=2), chunk, works)


class _Signature(NamedTuple):
    """Every static choice of a run; equal signatures share their compiled programs."""

    algorithm: str
    options: tuple
    model: str
    model_options: tuple
    input_shape: tuple
    num_classes: int
    mean: tuple
    std: tuple
    optimizer: str
    keep_state: bool
    local_epochs: int


def _hashable(value):
    return tuple(value) if isinstance(value, list) else value


@dataclass
class Federation:
    """A run made ready: data on the devices, schedule, state, programs."""

    spec: RunSpec
    dataset: Dataset
    partition: Partition
    program: Program
    scheduler: Scheduler
    state: Any
    inputs: ChunkInputs  # with an empty schedule
    lane_choice: LaneChoice

    @functools.cached_property
    def split(self) -> PartitionSummary:
        """The partition in numbers."""
        return self.partition.summary(self.dataset.train_labels, self.dataset.num_classes)

    def announce(self) -> None:
        """Log what is about to run: the split, the lanes, the share of useful work."""
        useful = self.scheduler.work.useful_fraction(self.scheduler.shape, self.spec.batch_size)
        log.info("data: %s. %s", self.dataset.name, self.split)
        log.info(
            "lanes: %s; %.1f %% of the samples that they run through are the clients'",
            self.program.plan.describe(),
            100 * useful,
        )
        if self.dataset.note:
            log.info("note: %s", self.dataset.note)

    def chunk_inputs(self, first: int, count: int, capacity: int) -> ChunkInputs:
        return self.inputs._replace(
            schedule=self.scheduler.chunk(first, count, capacity), num_rounds=jnp.int32(count)
        )

    def first_step(self, round_index: int, capacity: int) -> ChunkInputs:
        return self.inputs._replace(
            schedule=self.scheduler.first_step(round_index, capacity),
            num_rounds=jnp.int32(1),
            num_eval_batches=jnp.int32(1),
        )


def prepare(
    spec: RunSpec,
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    lanes: int | str = "auto",
    devices: int | None = None,
) -> Federation:
    """Check the settings, make the partition, place the data. Nothing is compiled yet."""
    spec = spec.resolved()
    if dataset is None:
        require(spec.dataset != "user", "dataset", "user", "a Dataset passed to simulate()")
        dataset = load_dataset(spec.dataset, normalisation=spec.normalisation)
    count = len(dataset.train_labels)
    require(
        lanes == "auto" or (isinstance(lanes, int) and lanes >= 1),
        "lanes",
        lanes,
        "'auto' or a whole number >= 1",
    )
    require(
        devices is None or 1 <= devices <= len(jax.devices()),
        "devices",
        devices,
        f"1 to {len(jax.devices())}, the devices that there are",
    )
    require(
        spec.num_clients <= count,
        "num_clients",
        spec.num_clients,
        f"at most {count}, the number of training samples of {dataset.name}",
    )
    partition = partition or _partition(spec, dataset)
    model_options = {
        name: getattr(spec, name)
        for name in ("width", "depth", "norm")
        if getattr(spec, name) is not None
    }
    signature = _Signature(
        algorithm=spec.algorithm,
        options=tuple(sorted((k, _hashable(v)) for k, v in spec.options.items())),
        model=spec.model,
        model_options=tuple(sorted(model_options.items())),
        input_shape=tuple(dataset.input_shape),
        num_classes=dataset.num_classes,
        mean=tuple(dataset.mean),
        std=tuple(dataset.std),
        optimizer=spec.local_optimizer,
        keep_state=spec.optimizer_state == "keep",
        local_epochs=spec.local_epochs,
    )
    sampled = cohort_size(spec.num_clients, spec.participation)
    devices = min(devices or len(jax.devices()), sampled)
    choice = LaneChoice(lanes, {})
    if lanes == "auto":
        choice = choose_lanes(
            _training(signature),
            batch_size=spec.batch_size,
            devices=devices,
            cohort_size=sampled,
            label=f"{spec.model} {model_options} {dataset.input_shape} {dataset.num_classes}",
        )
    program = _program(signature, devices, choice.lanes)
    plan = program.plan
    scheduler = Scheduler(
        partition,
        seed=spec.seed,
        rounds=spec.rounds,
        participation=spec.participation,
        passes=spec.local_epochs + program.algorithm.extra_passes,
        batch_size=spec.batch_size,
        averaging=spec.averaging,
        eval_every=spec.eval_every,
        devices=plan.devices,
        lanes=plan.lanes,
    )
    hp = {name: jnp.float32(value) for name, value in spec.hp.items()}
    state = program.init(hp, device_key(spec.seed, Stream.INIT), spec.num_clients)
    inputs = ChunkInputs(
        hp=plan.put(hp),
        train_key=plan.put(device_key(spec.seed, Stream.TRAIN)),
        schedule=None,
        num_rounds=None,
        num_eval_batches=None,
        examples=plan.put(
            Examples(
                jnp.asarray(dataset.train_images), jnp.asarray(dataset.train_labels, jnp.int32)
            )
        ),
        test=evaluation_set(plan, dataset.test_images, dataset.test_labels),
    )
    inputs = inputs._replace(num_eval_batches=jnp.int32(inputs.test.labels.shape[1]))
    return Federation(spec, dataset, partition, program, scheduler, plan.put(state), inputs, choice)


def _partition(spec: RunSpec, dataset: Dataset) -> Partition:
    given = {"alpha": spec.alpha, "classes_per_client": spec.classes}
    return make_partition(
        spec.partition,
        dataset.train_labels,
        dataset.num_classes,
        num_clients=spec.num_clients,
        seed=spec.partition_seed,
        **{name: value for name, value in given.items() if value is not None},
    )
