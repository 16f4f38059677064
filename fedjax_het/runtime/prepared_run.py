"""Runs that are ready on the host: their data, their schedules, and the programs they share."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.algorithms.base import Algorithm, FederationData
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.autotune.search import LaneChoice
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.condensation_work import ClientClassWork
from fedjax_het.core.evaluation import ClientTestsShape, compute_client_tests_shape
from fedjax_het.core.execution_plan import LANES_AXIS, PER_RUN, RUNS_AXIS, ExecutionPlan
from fedjax_het.core.lr_schedules import compute_round_lr_factors, is_round_schedule_hyperparameter
from fedjax_het.core.rng import Stream
from fedjax_het.core.schedule import Scheduler, ScheduleShape, compute_useful_fraction, merge_shapes
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import Dataset, Partition, PartitionSummary, ServerSummary
from fedjax_het.data.server_data import LabeledImages
from fedjax_het.runtime.compiled_programs import CompiledPrograms
from fedjax_het.runtime.data_assignment import DataAssignment
from fedjax_het.runtime.placement import DEVICE_STATE
from fedjax_het.utils.arrays import stack_on_host

MAX_TRIAL_RUNS, MAX_TRIAL_ROUNDS = 4, 3  # that are packed on each number of lanes that is tried


class InitialModel(NamedTuple):
    """The model that a run begins with if it is read from a file, on the host, and its digest."""

    variables: Any
    digest: str


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedRun(DataAssignment):
    """A run that is ready on the host: its data, and when each client is worked on.

    Attributes:
      scheduler: plans the work of every round.
      tuning_scheduler: plans the fine-tuning of all clients' copies, where copies are evaluated.
      diagnostics_scheduler: plans the round in which all clients' gradients are measured.
      method_inputs: the other inputs of the method by name, see `Algorithm.round_inputs`.
      initial_model: the model that the run begins with, where it is read from a file.
    """

    scheduler: Scheduler
    tuning_scheduler: Scheduler | None = None
    diagnostics_scheduler: Scheduler | None = None
    method_inputs: dict[str, Any] = field(default_factory=dict)
    initial_model: InitialModel | None = None

    @property
    def hp(self) -> dict[str, Any]:
        """The numeric hyper-parameters as programs read them."""
        traced_items = (
            item for item in self.spec.hp.items() if not is_round_schedule_hyperparameter(item[0])
        )
        return {name: np.float32(value) for name, value in traced_items}

    @functools.cached_property
    def lr_factors(self) -> np.ndarray:
        """Factors of `local_lr` in each round, float32 `[R]`."""
        spec = self.spec
        return compute_round_lr_factors(spec.lr_schedule or "constant", spec.hp, spec.rounds)


class GroupShapes(NamedTuple):
    """Static sizes that hold for every round of all runs of a group."""

    schedule: ScheduleShape
    tuning: ScheduleShape | None
    diagnostics: ScheduleShape | None
    client_tests: ClientTestsShape | None


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that the same programs serve, `program.plan.max_parallel_runs` of them at a time.

    Attributes:
      program: their compiled programs.
      prepared_runs: the runs.
      dataset: the data set of all of them.
      pool: the images from which the server's examples are, beside those of training.
      shapes: sizes that hold for every round of all of them.
      lane_choice: the number of lanes, and how it was chosen.
      client_state: where client states are.
      shared_inputs: the inputs of the programs that are the same for all runs, by name.
    """

    program: CompiledPrograms
    prepared_runs: list[PreparedRun]
    dataset: Dataset
    pool: LabeledImages | None
    shapes: GroupShapes
    lane_choice: LaneChoice
    client_state: str = DEVICE_STATE
    shared_inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def runs_parallel(self) -> bool:
        """Whether runs are on devices of their own, which gives arrays a leading axis of runs."""
        return self.program.plan.mesh_axis == RUNS_AXIS

    def stack_slots(self, trees: Sequence[Any]) -> Any:
        """Place one pytree per slot on the devices: stacked, or the only one."""
        plan = self.program.plan
        if not self.runs_parallel:
            return plan.put(trees[0])
        return plan.put(jax.tree.map(lambda *leaves: stack_on_host(leaves), *trees), PER_RUN)

    def summarize_partition(self, prepared_run: PreparedRun) -> PartitionSummary:
        """Return the partition of a run in numbers."""
        return prepared_run.partition.summarize(self.dataset.train_labels, self.dataset.num_classes)

    def summarize_server_data(self, prepared_run: PreparedRun) -> ServerSummary | None:
        """Return the server's examples in numbers; None where it has none."""
        if prepared_run.server_data is None:
            return None
        return prepared_run.server_data.summarize(self.dataset, prepared_run.partition, self.pool)

    def useful_work_fraction(self, prepared_runs: Sequence[PreparedRun]) -> float:
        """Return the fraction of processed samples that are real rather than padding."""
        schedulers = [f.scheduler for f in prepared_runs]
        is_concurrent = self.program.plan.mesh_axis == LANES_AXIS
        return compute_useful_fraction(schedulers, is_concurrent=is_concurrent)


def build_prepared_run(
    data_assignment: DataAssignment,
    work_items: ClientWork | ClientClassWork,
    algorithm: Algorithm,
    *,
    blocks: int,
    lanes: int,
    initial_model: InitialModel | None = None,
) -> PreparedRun:
    """Return the run with its schedules for so many blocks of lanes."""
    spec, partition = data_assignment.spec, data_assignment.partition
    layout = {"blocks": blocks, "lanes": lanes}
    scheduler = Scheduler(
        data_assignment.training_partition,
        work_items,
        seed=spec.seed,
        num_rounds=spec.rounds,
        participation=spec.participation,
        averaging=spec.averaging,
        eval_every=spec.eval_every,
        **layout,
    )
    tuning_scheduler = diagnostics_scheduler = None
    if algorithm.fine_tuning is not None:
        tuning = algorithm.fine_tuning
        tuning_work = ClientWork(
            partition,
            tuning.epochs,
            spec.batch_size,
            max_num_steps=tuning.steps,
            stream=Stream.TUNING,
        )
        tuning_scheduler = _build_full_participation_scheduler(
            spec, partition, tuning_work, rounds=spec.rounds, averaging=None, **layout
        )
    if spec.gradient_gaps:  # one round, which serves whenever gradients are due
        diagnostics_work = ClientWork(partition, 1, spec.batch_size)
        diagnostics_scheduler = _build_full_participation_scheduler(
            spec,
            partition,
            diagnostics_work,
            rounds=1,
            averaging="weighted",
            **layout,
        )
    return PreparedRun(
        **vars(data_assignment),
        scheduler=scheduler,
        tuning_scheduler=tuning_scheduler,
        diagnostics_scheduler=diagnostics_scheduler,
        initial_model=initial_model,
    )


def build_trial_schedulers(
    data_assignments: Sequence[DataAssignment],
    work_items: Sequence[ClientWork | ClientClassWork],
    blocks: int,
    lanes: int,
) -> list[Scheduler]:
    """Return schedulers of a few rounds of a few runs, to estimate how long lanes are idle."""
    trial_runs = itertools.islice(zip(data_assignments, work_items, strict=True), MAX_TRIAL_RUNS)
    return [
        Scheduler(
            data_assignment.training_partition,
            items,
            seed=data_assignment.spec.seed,
            num_rounds=min(data_assignment.spec.rounds, MAX_TRIAL_ROUNDS),
            participation=data_assignment.spec.participation,
            averaging=data_assignment.spec.averaging,
            eval_every=data_assignment.spec.eval_every,
            blocks=blocks,
            lanes=lanes,
        )
        for data_assignment, items in trial_runs
    ]


def _build_full_participation_scheduler(
    spec: ResolvedRunSpec,
    partition: Partition,
    work_items: ClientWork,
    *,
    rounds: int,
    **settings: Any,
) -> Scheduler:
    """Return a scheduler of all clients in every round that is evaluated."""
    return Scheduler(
        partition,
        work_items,
        seed=spec.seed,
        num_rounds=rounds,
        participation=1.0,
        eval_every=spec.eval_every,
        **settings,
    )


def build_work_items(
    data_assignment: DataAssignment, dataset: Dataset, algorithm: Algorithm
) -> ClientWork | ClientClassWork:
    """Return the work that the lanes of a run do."""
    spec, partition = data_assignment.spec, data_assignment.training_partition
    if algorithm.condensation_work is None:
        num_passes = (spec.local_epochs or 0) + algorithm.extra_passes
        return ClientWork(
            partition, num_passes, spec.batch_size, extra_batches=spec.local_steps or 0
        )
    labels, num_classes = dataset.train_labels, dataset.num_classes
    return ClientClassWork(
        partition, labels, num_classes, algorithm.condensation_work, spec.batch_size
    )


def compute_group_shapes(prepared_runs: Sequence[PreparedRun], plan: ExecutionPlan) -> GroupShapes:
    """Return sizes that hold for all of these runs."""
    first = prepared_runs[0]
    tuning = diagnostics = client_tests = None
    compute_shape = partial(merge_shapes, num_parallel=plan.num_parallel)
    if first.tuning_scheduler is not None:
        tuning = compute_shape([f.tuning_scheduler for f in prepared_runs if f.tuning_scheduler])
    if first.diagnostics_scheduler is not None:
        diagnostics = compute_shape(
            [f.diagnostics_scheduler for f in prepared_runs if f.diagnostics_scheduler]
        )
    if first.client_tests is not None:
        shapes = (
            compute_client_tests_shape(plan, f.client_tests)
            for f in prepared_runs
            if f.client_tests is not None
        )
        client_tests = ClientTestsShape(*map(max, zip(*shapes, strict=True)))
    schedule = compute_shape([f.scheduler for f in prepared_runs])
    return GroupShapes(schedule, tuning, diagnostics, client_tests)


def get_server_examples(
    prepared_run: PreparedRun, dataset: Dataset, pool: LabeledImages | None
) -> Examples | None:
    """Return the server's examples, on the host; None where it has none."""
    if prepared_run.server_data is None:
        return None
    return Examples(*prepared_run.server_data.get_examples(dataset, pool))


def build_federation_data(
    prepared_run: PreparedRun, dataset: Dataset, pool: LabeledImages | None
) -> FederationData:
    """Return the data that a method's functions on the host read."""
    spec, samples_per_client = prepared_run.spec, None
    if spec.local_steps is not None:
        partition, steps = prepared_run.partition, spec.local_steps
        samples_per_client = int(
            ClientWork(partition, 0, spec.batch_size, extra_batches=steps).num_samples.sum()
        )
    return FederationData(
        dataset,
        prepared_run.partition,
        get_server_examples(prepared_run, dataset, pool),
        spec.local_epochs,
        spec.partition_seed,
        samples_per_client,
    )


def add_method_inputs(
    prepared_runs: Sequence[PreparedRun],
    algorithm: Algorithm,
    dataset: Dataset,
    pool: LabeledImages | None,
) -> list[PreparedRun]:
    """Return the runs with the inputs that only their method reads."""
    if not algorithm.round_inputs:
        return list(prepared_runs)
    federation_data = [
        build_federation_data(prepared_run, dataset, pool) for prepared_run in prepared_runs
    ]
    inputs_by_name = {
        round_input.name: round_input.make_inputs(federation_data)
        for round_input in algorithm.round_inputs
    }
    return [
        dataclasses.replace(
            prepared_run, method_inputs={name: trees[i] for name, trees in inputs_by_name.items()}
        )
        for i, prepared_run in enumerate(prepared_runs)
    ]
