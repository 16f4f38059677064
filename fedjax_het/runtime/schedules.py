"""Schedules of runs: who works when, planned by run and padded for a call of the program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_het.algorithms.base import Algorithm, Traffic
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.client_loop import RoundSchedule
from fedjax_het.core.execution_plan import PER_DEVICE, PER_RUN, RUNS_AXIS, ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.rng import Stream
from fedjax_het.core.run_mapping import SCHEDULE_PLACEMENTS
from fedjax_het.core.schedule import (
    AdaptiveScheduler,
    MeasureLosses,
    RoundPlan,
    RoundPlans,
    RoundSettings,
    Scheduler,
    ScheduleShape,
    merge_segment_ends,
    stack_rounds,
    with_state_rows,
)
from fedjax_het.core.work_items import ClientClassWork, ClientWork, DriftingWork, Workload
from fedjax_het.data import Partition, partition_from_clients
from fedjax_het.runtime.data_assignment import DataAssignment
from fedjax_het.systems import (
    SYSTEM_SETTING,
    AdaptiveSelection,
    AsynchronousSimulation,
    DeviceModel,
    Federation,
    SystemSimulation,
    has_poisson_sampling,
)
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.cohorts import compute_cohort_size
from fedjax_het.utils.errors import ConfigError, display_name


def bind_scheduler(
    assignment: DataAssignment, algorithm: Algorithm, training: LocalTraining
) -> Callable[..., Scheduler]:
    """Return `Scheduler` with the work of a run.

    Args:
      assignment: the data of the run.
      algorithm: the method.
      training: how clients train.

    Returns:
      A function of `blocks` and `lanes`, and of fields of `RoundSettings` to replace.
    """
    spec, partition = assignment.spec, assignment.partition
    if algorithm.trains_on_server_data and assignment.server_data is not None:
        # Clients train on the server's examples, too.
        server_indices = assignment.server_data.indices
        client_indices = map(partition.client_indices, range(partition.num_clients))
        partition = partition_from_clients(
            [np.concatenate([indices, server_indices]) for indices in client_indices]
        )
    dataset, pair_work = assignment.client_dataset, algorithm.condensation_work

    def make_work(partition: Partition) -> ClientWork | ClientClassWork:
        if pair_work is not None:
            labels, num_classes = dataset.train_classes, dataset.num_classes
            return ClientClassWork(partition, labels, num_classes, pair_work, spec.batch_size)
        num_passes = (spec.local_epochs or 0) + algorithm.extra_passes
        extra_batches = spec.local_steps or 0
        return ClientWork(partition, num_passes, spec.batch_size, extra_batches=extra_batches)

    drift = assignment.drift
    work: ClientWork | ClientClassWork | DriftingWork
    if drift is None:
        work = make_work(partition)
    else:
        works = [make_work(part) for part in drift.partitions]
        work = DriftingWork(works, drift.get_phase, partition)
    simulation = _make_simulation(assignment, algorithm, training, work)
    if simulation is None:
        return _bind_settings(spec, work)

    def get_workload(round_index: int) -> Workload:
        return work.of_round(round_index).make_workload(algorithm.extra_passes)

    def start_plans(measure_losses: MeasureLosses | None = None) -> RoundPlans:
        return simulation.simulate_rounds(get_workload, spec.rounds, measure_losses)

    if not simulation.is_adaptive:
        return _bind_settings(spec, work, list(start_plans()))
    settings, shortens_work = _get_round_settings(spec), simulation.shortens_work

    def make_adaptive(blocks: int, lanes: int, **changes: Any) -> Scheduler:
        arguments = (work, settings._replace(**changes), blocks, lanes, start_plans)
        return AdaptiveScheduler(*arguments, shortens_work=shortens_work)

    return make_adaptive


def _make_simulation(
    assignment: DataAssignment,
    algorithm: Algorithm,
    training: LocalTraining,
    work: ClientWork | ClientClassWork | DriftingWork,
) -> SystemSimulation | None:
    """Return the simulation of the clients' devices; None for a run without."""
    spec = assignment.spec
    models, asynchronous = SYSTEM_SETTING.parse(spec.system), algorithm.asynchronous
    if not models and asynchronous is None:
        return None
    traffic = Traffic(0, 0)
    if any(isinstance(model, DeviceModel) and model.reads_traffic for model in models):
        traffic = compute_traffic(algorithm, training, assignment.hp)
    federation = Federation(
        sizes=work.partition.sizes,
        cohort_size=compute_cohort_size(spec.num_clients, spec.participation),
        seed=spec.seed,
        partition_seed=spec.partition_seed,
        bytes_down=traffic.down,
        bytes_up=traffic.up,
        bytes_up_per_class=traffic.up_per_class,
        participation=spec.participation,
    )
    can_train_partly = algorithm.extra_passes == 0
    if asynchronous is None:
        return SystemSimulation(models, federation, can_train_partly=can_train_partly)
    return AsynchronousSimulation(
        models, federation, **asynchronous._asdict(), can_train_partly=can_train_partly
    )


def compute_traffic(algorithm: Algorithm, training: LocalTraining, hp: dict[str, Any]) -> Traffic:
    """Return the bytes of each client that takes part in a round, without a state.

    Cost: an abstract evaluation of the method's init.

    Args:
      algorithm: the method.
      training: how clients train.
      hp: values of the hyperparameters by name.

    Returns:
      The traffic.

    Raises:
      ConcretizationTypeError: if the traffic depends on values of the state.
    """
    model, traffic = training.task.model, []

    def count_traffic(key: jax.Array) -> tuple[()]:
        traffic.append(algorithm.traffic(hp, algorithm.init(hp, key, model.init(key), 1)))
        return ()

    jax.eval_shape(count_traffic, make_key(0))
    return traffic[0]


def _bind_settings(
    spec: ResolvedRunSpec,
    work: ClientWork | ClientClassWork | DriftingWork,
    plans: list[RoundPlan] | None = None,
) -> Callable[..., Scheduler]:
    """Return `Scheduler` with the settings of a run, which keyword arguments may replace."""
    settings = _get_round_settings(spec)

    def make(blocks: int, lanes: int, **changes: Any) -> Scheduler:
        return Scheduler(work, settings._replace(**changes), blocks, lanes, plans)

    return make


def require_fixed_selection(spec: RunSpec, caller: str) -> None:
    """Raise ConfigError if clients are selected by losses, which a function does not record.

    Args:
      spec: settings of the run.
      caller: name of the function.
    """
    for model in SYSTEM_SETTING.parse(spec.system):
        if isinstance(model, AdaptiveSelection):
            raise ConfigError(
                f"{display_name('system')} {model.name}: expected clients that are selected without losses, which "
                f"{caller} does not record"
            )


def _get_round_settings(spec: ResolvedRunSpec) -> RoundSettings:
    return RoundSettings(
        spec.seed,
        spec.rounds,
        spec.participation,
        spec.averaging,
        spec.eval_every,
        max_cohort_size=_compute_max_cohort_size(spec),
    )


def _compute_max_cohort_size(spec: ResolvedRunSpec) -> int | None:
    """Return a number of clients that a round of Poisson sampling does not exceed; else None.

    The probability of more clients in a round is below 1e-12.
    """
    if not has_poisson_sampling(spec):
        return None
    from scipy import stats

    num_clients = spec.num_clients
    largest = stats.binom.isf(1e-12, num_clients, spec.participation)
    return min(num_clients, 1 + int(largest))


def make_further_schedulers(
    assignment: DataAssignment, algorithm: Algorithm, layout: dict[str, int]
) -> dict[str, Any]:
    """Return the schedulers of work that only some runs have.

    Args:
      assignment: the data of the run.
      algorithm: the method.
      layout: the numbers of `blocks` and `lanes`.

    Returns:
      `tuning_scheduler` if copies are fine-tuned, `diagnostics_scheduler` if gradients are
      measured.
    """
    spec, partition, tuning = assignment.spec, assignment.partition, algorithm.fine_tuning
    schedulers: dict[str, Any] = {}
    all_clients: dict[str, Any] = {"participation": 1.0, "max_cohort_size": None}
    if tuning is not None:
        work = ClientWork(
            partition,
            tuning.epochs,
            spec.batch_size,
            max_num_steps=tuning.steps,
            stream=Stream.TUNING,
        )
        make = _bind_settings(spec, work)
        schedulers["tuning_scheduler"] = make(averaging=None, **all_clients, **layout)
    if spec.gradient_gaps:  # one round, which serves whenever gradients are due
        make = _bind_settings(spec, ClientWork(partition, 1, spec.batch_size))
        schedulers["diagnostics_scheduler"] = make(
            num_rounds=1, averaging="weighted", **all_clients, **layout
        )
    return schedulers


def build_schedules(
    schedulers: Sequence[Scheduler],
    rounds: range,
    shape: ScheduleShape,
    plan: ExecutionPlan,
    *,
    capacity: int,
    num_rows: int | None,
    first_step_only: bool,
) -> list[RoundSchedule]:
    """Return the rounds of a call of every slot, on the host.

    Args:
      schedulers: the scheduler of every slot of the plan.
      rounds: the rounds.
      shape: the sizes to which each round is padded.
      plan: the devices, and the lanes on them.
      capacity: number of rounds to which the call is padded.
      num_rows: size of the table of client states on the devices; None if all are on the devices.
      first_step_only: whether only the first step of every lane is planned.

    Returns:
      Schedules `[capacity, ...]` of the slots.
    """
    schedules = []
    for first in range(0, len(schedulers), plan.num_parallel):
        parallel = schedulers[first : first + plan.num_parallel]
        parallel_rounds = _make_rounds(parallel, shape, rounds, first_step_only=first_step_only)
        schedules += [stack_rounds(run_rounds, capacity) for run_rounds in parallel_rounds]
    if num_rows is not None:
        for i, (schedule, scheduler) in enumerate(zip(schedules, schedulers, strict=True)):
            work_ids = scheduler.trained_work_ids(np.unique(schedule.round))
            schedules[i] = with_state_rows(schedule, work_ids, num_rows)
    return schedules


def place_schedules(schedules: Sequence[RoundSchedule], plan: ExecutionPlan) -> RoundSchedule:
    """Return the rounds of a call on the devices.

    Args:
      schedules: the rounds of every slot of the plan, on the host.
      plan: the devices, and the lanes on them.

    Returns:
      Schedules `[capacity, ...]`, with a leading axis of runs where runs are parallel.
    """
    if plan.mesh_axis != RUNS_AXIS:
        return plan.put(schedules[0])
    stacked = [
        np.stack(leaves[:: plan.num_parallel] if kind == PER_DEVICE else leaves)
        for kind, leaves in zip(SCHEDULE_PLACEMENTS, zip(*schedules, strict=True), strict=True)
    ]
    return plan.put(RoundSchedule(*stacked), PER_RUN)


def _make_rounds(
    schedulers: Sequence[Scheduler], shape: ScheduleShape, rounds: range, *, first_step_only: bool
) -> list[list[RoundSchedule]]:
    """Return the rounds of each of the runs that one device executes in parallel.

    Segments end where any of the runs ends a client.
    """
    is_single_run = len(schedulers) == 1
    if not first_step_only:
        ends = [None if is_single_run else merge_segment_ends(schedulers, r) for r in rounds]
        return [
            [s.make_round(r, shape, end) for r, end in zip(rounds, ends, strict=True)]
            for s in schedulers
        ]
    steps = [[s.make_first_step_round(r, shape) for r in rounds] for s in schedulers]
    if is_single_run:
        return steps
    # One segment for all: where a lane has no client, it idles.
    return [
        [step._replace(num_segments=np.ones_like(step.num_segments)) for step in run_steps]
        for run_steps in steps
    ]
