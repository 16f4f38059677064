"""The inputs of the rounds' program, one function for each.

To add an input, give it a field in `core.round_program.ChunkInputs`, where rounds read it, a line in
`runtime.compiled_programs.get_input_kinds`, which says which programs read it, and a function in one
of the tables below. An input that one method alone reads needs none of it: see
`algorithms.base.RoundInput`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.client_loop import Examples
from fedjax_het.core.evaluation import (
    EvaluationSet,
    compute_test_batches,
    make_client_tests,
    place_evaluation_set,
)
from fedjax_het.core.execution_plan import PER_BLOCK, PER_DEVICE, PER_RUN, ExecutionPlan
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.core.round_program import SCHEDULE_PLACEMENTS, ChunkInputs
from fedjax_het.core.schedule import (
    RoundSchedule,
    Scheduler,
    ScheduleShape,
    merge_segment_ends,
    stack_rounds,
    with_state_rows,
)
from fedjax_het.runtime.prepared_run import PreparedRun, RunGroup, get_server_examples


@dataclass(frozen=True)
class InputContext:
    """The runs and rounds for which inputs are made.

    Attributes:
      group: the runs, their programs and data.
      slots: the run of each slot of the plan; an idle slot repeats the last run.
      num_runs: number of different runs among them.
      num_rows: rows of the table of client states on the devices, where the others are on the host.
      capacity: number of rounds that a call of the program has room for.
      rounds: the rounds of a call of the program.
      first_step_only: whether only the first step of every lane is made, to check its numbers.
    """

    group: RunGroup
    slots: Sequence[PreparedRun] = ()
    num_runs: int = 0
    num_rows: int | None = None
    capacity: int = 1
    rounds: range = field(default=range(0))
    first_step_only: bool = False

    @property
    def plan(self) -> ExecutionPlan:
        return self.group.program.plan

    def build_keys(self, stream: Stream) -> jax.Array:
        """Return the key of every slot's run."""
        return self.group.stack_slots([make_stream_key(f.spec.seed, stream) for f in self.slots])


# --- once for all runs of a group ----------------------------------------------------------------


def _build_examples(context: InputContext) -> Examples:
    data, pool = context.group.dataset, context.group.pool
    images, labels = data.train_images, data.train_labels
    if pool is not None and context.group.program.algorithm.trains_on_server_data:
        images, labels = np.concatenate([images, pool[0]]), np.concatenate([labels, pool[1]])
    return context.plan.put(Examples(images, np.asarray(labels, np.int32)))


def _build_test_set(context: InputContext) -> EvaluationSet:
    data = context.group.dataset
    return place_evaluation_set(context.plan, data.test_images, data.test_labels, data.test_domains)


def _build_test_examples(context: InputContext) -> Examples:
    data = context.group.dataset
    return context.plan.put(Examples(data.test_images, np.asarray(data.test_labels, np.int32)))


# --- once for the runs that go in step -----------------------------------------------------------


def _build_client_tests(context: InputContext) -> Any:
    shape = context.group.shapes.client_tests
    assert shape is not None
    partitions = (f.client_tests for f in context.slots if f.client_tests is not None)
    tests = [make_client_tests(context.plan, partition, shape) for partition in partitions]
    return (
        context.group.stack_slots(tests)
        if context.group.runs_parallel
        else context.plan.put(tests[0], PER_BLOCK)
    )


def _build_server_examples(context: InputContext) -> Examples:
    examples = [
        get_server_examples(f, context.group.dataset, context.group.pool) for f in context.slots
    ]
    return context.group.stack_slots(examples)


def _build_diagnostics_schedule(context: InputContext) -> RoundSchedule:
    """The one round in which all clients' gradients are measured."""
    assert context.group.shapes.diagnostics is not None
    schedulers = [
        f.diagnostics_scheduler for f in context.slots if f.diagnostics_scheduler is not None
    ]
    single_round = replace(context, rounds=range(1), capacity=1)
    schedules = _build_schedules(single_round, schedulers, context.group.shapes.diagnostics)
    return jax.tree.map(lambda a: a[:, 0] if context.group.runs_parallel else a[0], schedules)


# --- for every call ------------------------------------------------------------------------------


def _build_num_rounds(context: InputContext) -> jax.Array:
    """As many as there are, for every device that has a run."""
    count = jnp.int32(len(context.rounds))
    if not context.group.runs_parallel:
        return context.plan.put(count)
    device_starts = np.arange(0, len(context.slots), context.plan.num_parallel)
    return context.plan.put(np.int32(count) * (device_starts < context.num_runs), PER_DEVICE)


def _build_lr_factors(context: InputContext) -> jax.Array:
    """[R] factors of `local_lr` in the rounds of the call, padded to its capacity."""
    padding = np.ones(context.capacity - len(context.rounds), np.float32)
    rounds = list(context.rounds)
    return context.group.stack_slots(
        [np.append(f.lr_factors[rounds], padding) for f in context.slots]
    )


def _build_num_eval_batches(context: InputContext) -> jax.Array:
    """All of a block's; the first, where only first steps are made."""
    if context.first_step_only or context.group.program.algorithm.global_model is None:
        return context.plan.put(jnp.int32(1))
    _, batches = compute_test_batches(context.plan, context.group.dataset.test_images)
    return context.plan.put(jnp.int32(batches))


def _build_schedule(context: InputContext) -> RoundSchedule:
    schedulers = [f.scheduler for f in context.slots]
    return _build_schedules(context, schedulers, context.group.shapes.schedule, uses_paging=True)


def _build_tuning_schedule(context: InputContext) -> RoundSchedule:
    assert context.group.shapes.tuning is not None
    schedulers = [f.tuning_scheduler for f in context.slots if f.tuning_scheduler is not None]
    return _build_schedules(context, schedulers, context.group.shapes.tuning)


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
    if not context.group.runs_parallel:
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


# How each input is made, by its name in `ChunkInputs`: once for all runs of a group, ...
GROUP_INPUTS: dict[str, Callable[[InputContext], Any]] = {
    "num_eval_batches": _build_num_eval_batches,
    "examples": _build_examples,
    "test_set": _build_test_set,
    "test_examples": _build_test_examples,
}
# ... once for the runs that go in step, ...
RUN_INPUTS: dict[str, Callable[[InputContext], Any]] = {
    "hp": lambda context: context.group.stack_slots([f.hp for f in context.slots]),
    "train_key": lambda context: context.build_keys(Stream.TRAIN),
    "client_tests": _build_client_tests,
    "server_examples": _build_server_examples,
    "diagnostics_schedule": _build_diagnostics_schedule,
    "method_inputs": lambda context: context.group.stack_slots(
        [f.method_inputs for f in context.slots]
    ),
}
# ... and for every call of the program.
CALL_INPUTS: dict[str, Callable[[InputContext], Any]] = {
    "schedule": _build_schedule,
    "lr_factors": _build_lr_factors,
    "num_rounds": _build_num_rounds,
    "tuning_schedule": _build_tuning_schedule,
}
# The inputs that differ where only first steps are made.
FIRST_STEP_INPUTS = CALL_INPUTS | {
    "num_eval_batches": _build_num_eval_batches,
    "diagnostics_schedule": _build_diagnostics_schedule,
}
assert {*GROUP_INPUTS, *RUN_INPUTS, *CALL_INPUTS} == set(ChunkInputs._fields)


def build_inputs(
    context: InputContext, builders: dict[str, Callable[[InputContext], Any]]
) -> dict[str, Any]:
    """Return the inputs of one of the tables above that the program reads, by name."""
    kinds = context.group.program.input_kinds._asdict()
    is_read = {name: kind is not None and kind != {} for name, kind in kinds.items()}
    return {name: build(context) for name, build in builders.items() if is_read[name]}


def build_chunk_inputs(context: InputContext, cached_inputs: dict[str, Any]) -> ChunkInputs:
    """Return the inputs of a call: those that stay the same, and those of its rounds."""
    builders = FIRST_STEP_INPUTS if context.first_step_only else CALL_INPUTS
    return ChunkInputs(**(cached_inputs | build_inputs(context, builders)))


def with_zero_rounds(context: InputContext, inputs: ChunkInputs) -> ChunkInputs:
    """The same, of which the program runs none."""
    return inputs._replace(num_rounds=_build_num_rounds(replace(context, rounds=range(0))))
