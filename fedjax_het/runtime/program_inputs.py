"""What the rounds' program reads, one record an input: its name, what it is to the federations,
who wants it, and how it is made.

To add one, give it a field in `core.round_program.ChunkInputs`, where rounds read it, and a record in
`PROGRAM_INPUTS`. What one method alone reads needs neither: see `algorithms.base.RoundInput`.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.evaluation import (
    EvaluationSet,
    compute_test_batches,
    make_client_tests,
    place_evaluation_set,
)
from fedjax_het.core.execution_plan import (
    PER_BLOCK,
    PER_DEVICE,
    PER_RUN,
    REPLICATED,
    RUNS_AXIS,
    ExecutionPlan,
)
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.core.round_program import SCHEDULE_PLACEMENTS, ChunkInputs, EvaluationOptions
from fedjax_het.core.schedule import (
    RoundSchedule,
    Scheduler,
    ScheduleShape,
    merge_segment_ends,
    stack_rounds,
    with_state_rows,
)
from fedjax_het.data import Dataset
from fedjax_het.data.server_data import LabeledImages
from fedjax_het.runtime.prepared_run import GroupShapes, PreparedRun, get_server_examples
from fedjax_het.utils.arrays import stack_on_host


class ProgramSpec(NamedTuple):
    """The program that reads: what decides which inputs it wants. Static."""

    algorithm: Algorithm
    evaluation: EvaluationOptions
    has_server_data: bool  # whether the server has examples
    has_lr_schedule: bool = False  # whether the local rate has a schedule over rounds


@dataclass(frozen=True)
class InputContext:
    """What inputs are made of.

    Attributes:
      reader: the program that reads them.
      dataset, pool, shapes: of a group; pool: what the server's examples are from besides those of
        training.
      places: the federation of each place of the plan, an idle place's being the last federation
        once more, of which `num_federations` are different ones.
      num_rows: of the table of client states on the devices, where the others are on the host.
      rounds: of a call of the program, which has room for `capacity` of them.
      trial: whether it only makes the first step of every lane, to check its numbers.
    """

    plan: ExecutionPlan
    program_spec: ProgramSpec
    dataset: Dataset
    pool: LabeledImages | None
    shapes: GroupShapes
    slots: Sequence[PreparedRun] = ()
    num_runs: int = 0
    num_rows: int | None = None
    capacity: int = 1
    rounds: range = field(default=range(0))
    first_step_only: bool = False

    @property
    def runs_parallel(self) -> bool:
        """Whether federations are on devices of their own, which gives arrays an axis of places."""
        return self.plan.mesh_axis == RUNS_AXIS

    def stack_slots(self, trees: Sequence[Any]) -> Any:
        """One pytree for every place -> what programs take: stacked, or the only one."""
        if not self.runs_parallel:
            return self.plan.put(trees[0])
        return self.plan.put(jax.tree.map(lambda *leaves: stack_on_host(leaves), *trees), PER_RUN)

    def build_keys(self, stream: Stream) -> jax.Array:
        """The key of every place's run."""
        return self.stack_slots([make_stream_key(f.spec.seed, stream) for f in self.slots])


class InputScope(enum.Enum):
    """How often an input is made."""

    GROUP = "once for all federations of a group"
    RUNS = "once for the federations that go in step"
    CALL = "for every call of the program"


class ProgramInput(NamedTuple):
    """One of the fields of `ChunkInputs`.

    kind: what it, or each of its parts, is to the federations, see `ExecutionPlan.map_runs`.
    wanted(reader): whether there is one; else it is None.
    make(source) -> the arrays, placed.
    trial: whether it is another one where only first steps are made.
    """

    name: str
    kind: Any
    is_required: Callable[[ProgramSpec], bool]
    build: Callable[[InputContext], Any]
    scope: InputScope
    varies_in_first_step: bool = False


def _is_always_required(program_spec: ProgramSpec) -> bool:
    return True


def _has_global_model(program_spec: ProgramSpec) -> bool:
    return program_spec.algorithm.global_model is not None


def _has_client_tests(program_spec: ProgramSpec) -> bool:
    return program_spec.evaluation.has_client_tests


# --- once for all federations of a group ---------------------------------------------------------


def _build_examples(context: InputContext) -> Examples:
    data, pool = context.dataset, context.pool
    images, labels = data.train_images, data.train_labels
    if pool is not None and context.program_spec.algorithm.trains_on_server_data:
        images, labels = np.concatenate([images, pool[0]]), np.concatenate([labels, pool[1]])
    return context.plan.put(Examples(images, np.asarray(labels, np.int32)))


def _build_test_set(context: InputContext) -> EvaluationSet:
    data = context.dataset
    return place_evaluation_set(context.plan, data.test_images, data.test_labels, data.test_domains)


def _build_test_examples(context: InputContext) -> Examples:
    data = context.dataset
    return context.plan.put(Examples(data.test_images, np.asarray(data.test_labels, np.int32)))


# --- once for the federations that go in step ----------------------------------------------------


def _build_client_tests(context: InputContext) -> Any:
    shape = context.shapes.client_tests
    assert shape is not None
    partitions = (f.client_tests for f in context.slots if f.client_tests is not None)
    tests = [make_client_tests(context.plan, partition, shape) for partition in partitions]
    return (
        context.stack_slots(tests)
        if context.runs_parallel
        else context.plan.put(tests[0], PER_BLOCK)
    )


def _build_server_examples(context: InputContext) -> Examples:
    examples = [get_server_examples(f, context.dataset, context.pool) for f in context.slots]
    return context.stack_slots(examples)


def _build_diagnostics_schedule(context: InputContext) -> RoundSchedule:
    """The one round in which all clients' gradients are measured."""
    assert context.shapes.diagnostics is not None
    schedulers = [
        f.diagnostics_scheduler for f in context.slots if f.diagnostics_scheduler is not None
    ]
    single_round = replace(context, rounds=range(1), capacity=1)
    schedules = _build_schedules(single_round, schedulers, context.shapes.diagnostics)
    return jax.tree.map(lambda a: a[:, 0] if context.runs_parallel else a[0], schedules)


# --- for every call ------------------------------------------------------------------------------


def _build_num_rounds(context: InputContext) -> jax.Array:
    """As many as there are, for every device that has a run."""
    count = jnp.int32(len(context.rounds))
    if not context.runs_parallel:
        return context.plan.put(count)
    device_starts = np.arange(0, len(context.slots), context.plan.num_parallel)
    return context.plan.put(np.int32(count) * (device_starts < context.num_runs), PER_DEVICE)


def _build_lr_factors(context: InputContext) -> jax.Array:
    """[R] factors of `local_lr` in the rounds of the call, padded to its capacity."""
    padding = np.ones(context.capacity - len(context.rounds), np.float32)
    rounds = list(context.rounds)
    return context.stack_slots([np.append(f.lr_factors[rounds], padding) for f in context.slots])


def _build_num_eval_batches(context: InputContext) -> jax.Array:
    """All of a block's; the first, where only first steps are made."""
    if context.first_step_only or not _has_global_model(context.program_spec):
        return context.plan.put(jnp.int32(1))
    _, batches = compute_test_batches(context.plan, context.dataset.test_images)
    return context.plan.put(jnp.int32(batches))


def _build_schedule(context: InputContext) -> RoundSchedule:
    schedulers = [f.scheduler for f in context.slots]
    return _build_schedules(context, schedulers, context.shapes.schedule, uses_paging=True)


def _build_tuning_schedule(context: InputContext) -> RoundSchedule:
    assert context.shapes.tuning is not None
    schedulers = [f.tuning_scheduler for f in context.slots if f.tuning_scheduler is not None]
    return _build_schedules(context, schedulers, context.shapes.tuning)


def _build_schedules(
    context: InputContext,
    schedulers: Sequence[Scheduler],
    shape: ScheduleShape,
    *,
    uses_paging: bool = False,
) -> RoundSchedule:
    """The rounds of a call as every place's scheduler plans them, padded to the call's capacity."""
    num_parallel, schedules = context.plan.num_parallel, []
    for start in range(0, len(schedulers), num_parallel):
        parallel_schedulers = schedulers[start : start + num_parallel]
        schedules += [
            stack_rounds(
                _build_rounds(context, scheduler, parallel_schedulers, shape), context.capacity
            )
            for scheduler in parallel_schedulers
        ]
    if uses_paging and context.num_rows is not None:
        schedules = [
            with_state_rows(
                schedule, scheduler.trained_work_ids(np.unique(schedule.round)), context.num_rows
            )
            for schedule, scheduler in zip(schedules, schedulers, strict=True)
        ]
    if not context.runs_parallel:
        return context.plan.put(schedules[0])
    columns = zip(SCHEDULE_PLACEMENTS, zip(*schedules, strict=True), strict=True)
    stacked_schedule = RoundSchedule(
        *(
            np.stack(leaves[::num_parallel] if kind == PER_DEVICE else leaves)
            for kind, leaves in columns
        )
    )
    return context.plan.put(stacked_schedule, PER_RUN)


def _build_rounds(
    context: InputContext,
    scheduler: Scheduler,
    parallel_schedulers: Sequence[Scheduler],
    shape: ScheduleShape,
) -> list[RoundSchedule]:
    """A scheduler's rounds, whose segments end where any of the runs `in_step` ends a client."""
    is_single_run = len(parallel_schedulers) == 1
    if not context.first_step_only:
        return [
            scheduler.make_round(
                r, shape, None if is_single_run else merge_segment_ends(parallel_schedulers, r)
            )
            for r in context.rounds
        ]
    steps = [scheduler.make_first_step_round(r, shape) for r in context.rounds]
    if is_single_run:
        return steps
    # One segment for all: where a lane has no client, it idles.
    return [step._replace(num_segments=np.ones_like(step.num_segments)) for step in steps]


PROGRAM_INPUTS: tuple[ProgramInput, ...] = (
    ProgramInput(
        "hp",
        PER_RUN,
        _is_always_required,
        lambda context: context.stack_slots([f.hp for f in context.slots]),
        InputScope.RUNS,
    ),
    ProgramInput(
        "train_key",
        PER_RUN,
        _is_always_required,
        lambda context: context.build_keys(Stream.TRAIN),
        InputScope.RUNS,
    ),
    ProgramInput(
        "schedule",
        SCHEDULE_PLACEMENTS,
        _is_always_required,
        _build_schedule,
        InputScope.CALL,
        varies_in_first_step=True,
    ),
    ProgramInput(
        "lr_factors",
        PER_RUN,
        lambda program_spec: program_spec.has_lr_schedule,
        _build_lr_factors,
        InputScope.CALL,
        varies_in_first_step=True,
    ),
    ProgramInput(
        "num_rounds",
        PER_DEVICE,
        _is_always_required,
        _build_num_rounds,
        InputScope.CALL,
        varies_in_first_step=True,
    ),
    ProgramInput(
        "num_eval_batches",
        REPLICATED,
        _is_always_required,
        _build_num_eval_batches,
        InputScope.GROUP,
        varies_in_first_step=True,
    ),
    ProgramInput("examples", REPLICATED, _is_always_required, _build_examples, InputScope.GROUP),
    ProgramInput(
        "tuning_schedule",
        SCHEDULE_PLACEMENTS,
        lambda program_spec: program_spec.algorithm.fine_tuning is not None,
        _build_tuning_schedule,
        InputScope.CALL,
        varies_in_first_step=True,
    ),
    ProgramInput("test_set", REPLICATED, _has_global_model, _build_test_set, InputScope.GROUP),
    ProgramInput("client_tests", PER_RUN, _has_client_tests, _build_client_tests, InputScope.RUNS),
    ProgramInput(
        "test_examples", REPLICATED, _has_client_tests, _build_test_examples, InputScope.GROUP
    ),
    ProgramInput(
        "server_examples",
        PER_RUN,
        lambda program_spec: program_spec.has_server_data,
        _build_server_examples,
        InputScope.RUNS,
    ),
    ProgramInput(
        "diagnostics_schedule",
        SCHEDULE_PLACEMENTS,
        lambda program_spec: program_spec.evaluation.diagnostics_every > 0,
        _build_diagnostics_schedule,
        InputScope.RUNS,
        varies_in_first_step=True,
    ),
    ProgramInput(
        "method_inputs",
        PER_RUN,
        lambda program_spec: bool(program_spec.algorithm.round_inputs),
        lambda context: context.stack_slots([f.method_inputs for f in context.slots]),
        InputScope.RUNS,
    ),
)
assert {program_input.name for program_input in PROGRAM_INPUTS} == set(ChunkInputs._fields)


def get_input_kinds(program_spec: ProgramSpec) -> ChunkInputs:
    """What each of a program's inputs is to the federations."""
    return ChunkInputs(
        **{
            program_input.name: program_input.kind
            for program_input in PROGRAM_INPUTS
            if program_input.is_required(program_spec)
        }
    )


def build_group_inputs(context: InputContext) -> dict[str, Any]:
    """What is the same for all federations of a group, by name."""
    return _build_inputs(context, lambda program_input: program_input.scope is InputScope.GROUP)


def build_run_inputs(context: InputContext) -> dict[str, Any]:
    """What stays the same for the federations that go in step, by name."""
    return _build_inputs(context, lambda program_input: program_input.scope is InputScope.RUNS)


def build_chunk_inputs(context: InputContext, cached_inputs: dict[str, Any]) -> ChunkInputs:
    """What a call of the program reads: what is `kept` of the group and the runs, and the rest."""
    inputs = _build_inputs(
        context,
        lambda program_input: (
            program_input.varies_in_first_step
            if context.first_step_only
            else program_input.scope is InputScope.CALL
        ),
    )
    return ChunkInputs(**(cached_inputs | inputs))


def with_zero_rounds(context: InputContext, inputs: ChunkInputs) -> ChunkInputs:
    """The same, of which the program runs none."""
    return inputs._replace(num_rounds=_build_num_rounds(replace(context, rounds=range(0))))


def _build_inputs(context: InputContext, is_due: Callable[[ProgramInput], bool]) -> dict[str, Any]:
    required_inputs = (
        program_input
        for program_input in PROGRAM_INPUTS
        if is_due(program_input) and program_input.is_required(context.program_spec)
    )
    return {program_input.name: program_input.build(context) for program_input in required_inputs}
