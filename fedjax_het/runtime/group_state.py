"""The state of runs that go in step, and the inputs of their programs.

To add an input, give it a field in `core.round_inputs.ChunkInputs`, where rounds read it, a line in
`compiled_programs._get_input_kinds`, which names the programs that read it, and a function in one of
three tables: `build._place_shared_inputs` for inputs of all runs of a group, `_build_run_inputs` for
inputs that stay the same, `_build_call_inputs` for inputs of a call. An input that only one method
reads is an `algorithms.base.RoundInput` of the method.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import ServerStage
from fedjax_het.core.client_loop import RoundSchedule
from fedjax_het.core.evaluation import (
    ClientTestsShape,
    compute_client_tests_shape,
    make_client_tests,
)
from fedjax_het.core.execution_plan import PER_BLOCK, PER_DEVICE, PER_RUN
from fedjax_het.core.memory import compute_compiled_bytes
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.core.round_inputs import SCHEDULE_PLACEMENTS, ChunkInputs
from fedjax_het.core.schedule import (
    Scheduler,
    ScheduleShape,
    merge_segment_ends,
    stack_rounds,
    with_state_rows,
)
from fedjax_het.core.state_paging import StatePager
from fedjax_het.runtime.build import PreparedRun, RunGroup
from fedjax_het.runtime.compiled_programs import compute_client_state_bytes
from fedjax_het.runtime.history import Curves, EarlyStop, Timing, build_curves
from fedjax_het.runtime.placement import HOST_STATE
from fedjax_het.runtime.progress import Progress
from fedjax_het.runtime.resumable_rounds import (
    LoopLayout,
    RoundProgress,
    is_long_round,
    trace_loop_layout,
)
from fedjax_het.utils.arrays import fetch_to_host

MAX_ROUNDS_PER_CHUNK = 16  # rounds per call of the compiled program, at most
# Schedules of the rounds of a call take at most these bytes, unless one round alone takes more. The
# limit also applies to client states that are moved to the devices and back for the call.
MAX_SCHEDULE_BYTES = MAX_CLIENT_TABLE_BYTES = 2**26


class ChunkLimits(NamedTuple):
    """Capacity of a call of the rounds' program.

    Attributes:
      max_rounds: number of rounds.
      num_rows: number of client states on the devices.
      num_prefetch: number of calls whose inputs are made before they are due.
    """

    max_rounds: int
    num_rows: int
    num_prefetch: int = 1


@dataclass(eq=False)
class GroupState:
    """The state of runs of one group that go in step.

    Attributes:
      group: the runs that share the programs, with their data.
      prepared_runs: the runs that go in step, at most one for each slot of the plan.
      limits: the rounds and client states that a call of the program has room for.
      curves: the metrics of each run.
      timing: seconds, and the rounds that were timed.
      progress: called between calls of the programs.
      cached_inputs: the inputs of the programs that stay the same, by name.
      state: the states of all runs, on the devices.
      pager: client states, where they are on the host.
      rounds_done: number of rounds that are done.
      round_progress: the parts of the next round that are done, where it is split into parts.
      force_resumable: whether rounds are split into parts, however long they take.
      diverged_rounds: of each run, the round in which it diverged, or the number of rounds done if
        server training between rounds diverged; None for a run that did not diverge.
      early_stops: how runs ended that were ended before their last round.
      reported: the runs whose results are written, while other runs continue.
      pause_every: calls end at multiples of this number of rounds (default: anywhere).
      begun_under: version, device and precision of runs that were begun under others.
    """

    group: RunGroup
    prepared_runs: list[PreparedRun]
    limits: ChunkLimits
    curves: list[Curves]
    timing: Timing
    progress: Callable[[Progress], None]
    cached_inputs: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    pager: StatePager | None = None
    rounds_done: int = 0
    round_progress: RoundProgress | None = None
    force_resumable: bool = False
    diverged_rounds: list[int | None] = field(default_factory=list)
    early_stops: dict[int, EarlyStop] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    pause_every: int | None = None
    begun_under: dict[int, dict] = field(default_factory=dict)

    @property
    def slots(self) -> list[PreparedRun]:
        """The run of each slot of the plan; an idle slot repeats the last run's work, or idles."""
        num_idle = self.group.program.plan.max_parallel_runs - len(self.prepared_runs)
        return self.prepared_runs + self.prepared_runs[-1:] * num_idle

    @property
    def total_rounds(self) -> int:
        """Number of rounds of each run."""
        return self.prepared_runs[0].spec.rounds

    @property
    def active(self) -> list[int]:
        """The runs that have neither diverged nor been ended early."""
        indices = range(len(self.prepared_runs))
        return [i for i in indices if self.diverged_rounds[i] is None and i not in self.early_stops]

    @property
    def is_unfinished(self) -> bool:
        """Whether rounds are left for a run."""
        return bool(self.active) and self.rounds_done < self.total_rounds

    @property
    def has_paged_states(self) -> bool:
        """Whether client states are on the host."""
        return self.group.client_state == HOST_STATE

    @property
    def shards_server_stages(self) -> bool:
        """Whether the server's work between rounds is on the devices of the rounds.

        The work of every run is then on the run's own device, or shared by the devices. Else the
        work is on one device.
        """
        plan = self.group.program.plan
        return self.group.runs_parallel or plan.server_parallelism.axis is not None

    @functools.cached_property
    def loop_layout(self) -> LoopLayout | None:
        """The parts of a round, if a round is long; else None.

        Traces the rounds' program; the trace is kept for its compilation. Raises ContractError.
        """
        program = self.group.program
        if program.plan.is_debug:
            return None
        inputs = (compute_state_shapes(self), self.build_first_step_inputs())
        jax.eval_shape(program.chunk.program, *inputs)
        if not (self.force_resumable or is_long_round(program, inputs[1])):
            return None
        return trace_loop_layout(program, *inputs)

    def get_accuracies(self, i: int) -> np.ndarray:
        """Return a run's main accuracy in the rounds that are done, NaN where not measured.

        The main accuracy is the global model's accuracy, otherwise the mean over clients.
        """
        has_global_model = self.group.program.algorithm.global_model is not None
        name = "test_accuracy" if has_global_model else "mean_client_accuracy"
        return self.curves[i][name][: self.rounds_done]

    def count_rounds_completed(self, i: int) -> int:
        """Return the number of rounds of a run that took place."""
        if i in self.early_stops:
            return self.early_stops[i].round
        diverged_round = self.diverged_rounds[i]
        return self.rounds_done if diverged_round is None else diverged_round

    def build_keys(self, stream: Stream) -> jax.Array:
        """Return the key of every slot's run."""
        keys = [make_stream_key(run.spec.seed, stream) for run in self.slots]
        return self.group.stack_slots(keys)

    def build_chunk_inputs(self, first: int, count: int) -> ChunkInputs:
        """Return the inputs of the program for rounds `first .. first + count - 1`.

        Args:
          first: the first round.
          count: number of rounds, at most `limits.max_rounds`.

        Returns:
          The inputs on the devices, padded to the capacity of a call.
        """
        call_inputs = _build_call_inputs(self, range(first, first + count))
        return ChunkInputs(**(self.cached_inputs | call_inputs))

    def build_first_step_inputs(self) -> ChunkInputs:
        """Return the inputs for the first step of every lane of the next round and evaluation."""
        first = min(self.rounds_done, self.total_rounds - 1)
        call_inputs = _build_call_inputs(self, range(first, first + 1), first_step_only=True)
        return ChunkInputs(**(self.cached_inputs | call_inputs))

    def without_rounds(self, inputs: ChunkInputs) -> ChunkInputs:
        """Return these inputs, of which the program executes no round."""
        return inputs._replace(num_rounds=_place_num_rounds(self, 0))

    def load_client_states(self, rounds: Sequence[int]) -> None:
        """Copy the states of the clients of these rounds to the devices, if they are on the host."""
        if self.pager is not None:
            self.state = self.state._replace(clients=())  # makes room
            self.state = self.state._replace(clients=self.pager.load_table(rounds))

    def store_client_states(self, rounds: Sequence[int]) -> None:
        """Copy the states back when these rounds are done."""
        if self.pager is not None:
            self.pager.store_table(self.state.clients, rounds)

    def fetch_states(self) -> list[Any]:
        """Return the state of every run, on the host."""
        host = jax.tree.map(fetch_to_host, self.state)
        return [self.group.take_run(host, i) for i in range(len(self.prepared_runs))]

    def list_programs(self) -> dict[str, tuple[Any, tuple]]:
        """Return the jitted programs of the runs by name, each with its inputs.

        The inputs are arrays, or shapes that are placed like the arrays.
        """
        programs, state = self.group.program, compute_state_shapes(self)
        stage_inputs = (
            self.cached_inputs["hp"],
            state,
            self.build_keys(Stream.SERVER),
            jnp.int32(1),
            self.cached_inputs.get("server_examples"),
        )
        if not self.shards_server_stages:
            stage_inputs = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stage_inputs
            )
        program = programs.chunk.program
        inputs: tuple = (state, self.build_first_step_inputs())
        if (layout := self.loop_layout) is not None:
            program = programs.partial_round.program
            inputs += (layout.build_spans(0), layout.carry_shapes)
        stages = programs.server_stages.items()
        return {"rounds": (program, inputs)} | {
            name: (stage.program, stage_inputs) for name, stage in stages
        }

    def count_stage_iterations(self, stage: ServerStage) -> int:
        """Return the iterations of the server's work between rounds that are done."""
        return stage.count_completed(self.group.take_run(self.state, 0))


def init_group(
    group: RunGroup,
    prepared_runs: Sequence[PreparedRun],
    *,
    progress: Callable[[Progress], None] | None = None,
    start_time: float | None = None,
    records: Sequence[dict] = (),
) -> GroupState:
    """Return the state of runs that are to go in step; their states are not allocated yet.

    Args:
      group: the runs that share the programs.
      prepared_runs: at most `max_parallel_runs` of them.
      progress: called between calls of the programs.
      start_time: the start of their wall-clock time, of `time.perf_counter` (default: now).
      records: the records of the checkpoints from which they resume.

    Returns:
      The state before the first round.
    """
    program = group.program
    assert len(prepared_runs) <= program.plan.max_parallel_runs
    evaluation, rounds = program.signature.evaluation, prepared_runs[0].spec.rounds
    group_state = GroupState(
        group,
        list(prepared_runs),
        _compute_chunk_limits(group, prepared_runs),
        curves=[
            build_curves(
                evaluation.missing_metrics(program.algorithm, rounds), run, evaluation.metrics
            )
            for run in prepared_runs
        ],
        timing=Timing() if start_time is None else Timing(start_time=start_time),
        progress=progress or (lambda progress: None),
        diverged_rounds=[None] * len(prepared_runs),
        force_resumable=any(record.get("within") for record in records),
    )
    group_state.cached_inputs = group.shared_inputs | _build_run_inputs(group_state)
    return group_state


def _compute_chunk_limits(group: RunGroup, prepared_runs: Sequence[PreparedRun]) -> ChunkLimits:
    """Return the most rounds for which schedules, and client states on the host, leave room."""
    spec, plan, shapes = prepared_runs[0].spec, group.program.plan, group.shapes
    names = [name for name in ("scheduler", "tuning_scheduler") if name in shapes]
    bytes_per_round = sum(shapes[name].num_bytes(spec.batch_size) for name in names)
    max_rounds = MAX_SCHEDULE_BYTES // (bytes_per_round * plan.max_parallel_runs)
    num_prefetch, cohort_size = 2 if max_rounds else 1, 0
    if group.client_state == HOST_STATE:
        cohort_size = max(run.scheduler.cohort_size for run in prepared_runs)
        row_bytes = compute_client_state_bytes(group.program, spec)
        table_bytes = row_bytes * cohort_size * plan.num_parallel  # of one round
        max_rounds = min(max_rounds, MAX_CLIENT_TABLE_BYTES // table_bytes)
    rounds = max(1, min(MAX_ROUNDS_PER_CHUNK, spec.rounds, max_rounds))
    num_clients = group.program.signature.evaluation.num_clients
    num_rows = min(num_clients, rounds * cohort_size) if cohort_size else num_clients
    return ChunkLimits(rounds, num_rows, num_prefetch)


def _build_run_inputs(group_state: GroupState) -> dict[str, Any]:
    """Return the inputs that do not change while the runs go in step, by name."""
    group, slots = group_state.group, group_state.slots
    plan, stack = group.program.plan, group.stack_slots

    def build_client_tests() -> Any:
        partitions = [run.client_tests for run in group.prepared_runs if run.client_tests]
        shapes = [compute_client_tests_shape(plan, partition) for partition in partitions]
        shape = ClientTestsShape(*map(max, zip(*shapes, strict=True)))
        tests = [make_client_tests(plan, r.client_tests, shape) for r in slots if r.client_tests]
        return stack(tests) if group.runs_parallel else plan.put(tests[0], PER_BLOCK)

    return group.program.build_inputs(
        {
            "hp": lambda: stack([run.hp for run in slots]),
            "train_key": lambda: group_state.build_keys(Stream.TRAIN),
            "client_tests": build_client_tests,
            "server_examples": lambda: stack([run.server_examples for run in slots]),
            "diagnostics_schedule": lambda: _build_diagnostics_schedule(group_state),
            "method_inputs": lambda: stack([run.method_inputs for run in slots]),
        }
    )


def _build_call_inputs(
    group_state: GroupState, rounds: range, *, first_step_only: bool = False
) -> dict[str, Any]:
    """Return the inputs that differ between calls, by name, padded to the capacity of a call.

    With `first_step_only` they have only the first step of every lane, to check its numbers.
    """
    group, limits = group_state.group, group_state.limits
    num_rows = limits.num_rows if group_state.has_paged_states else None
    build = functools.partial(_build_schedules, group_state, first_step_only=first_step_only)

    def build_lr_factors() -> jax.Array:
        padding = np.ones(limits.max_rounds - len(rounds), np.float32)
        factors = [run.lr_factors[list(rounds)] for run in group_state.slots]
        return group.stack_slots([np.append(factor, padding) for factor in factors])

    builders: dict[str, Callable[[], Any]] = {
        "schedule": lambda: build("scheduler", rounds, num_rows=num_rows),
        "lr_factors": build_lr_factors,
        "num_rounds": lambda: _place_num_rounds(group_state, len(rounds)),
        "tuning_schedule": lambda: build("tuning_scheduler", rounds),
    }
    if first_step_only:
        builders["num_eval_batches"] = lambda: group.program.plan.put(jnp.int32(1))
        builders["diagnostics_schedule"] = lambda: _build_diagnostics_schedule(
            group_state, first_step_only=True
        )
    return group.program.build_inputs(builders)


def _place_num_rounds(group_state: GroupState, count: int) -> jax.Array:
    """Return the number of rounds of a call, for every device that has a run."""
    plan = group_state.group.program.plan
    if not group_state.group.runs_parallel:
        return plan.put(jnp.int32(count))
    device_starts = np.arange(0, plan.max_parallel_runs, plan.num_parallel)
    is_used = device_starts < len(group_state.prepared_runs)
    return plan.put(np.int32(count) * is_used, PER_DEVICE)


def _build_diagnostics_schedule(
    group_state: GroupState, *, first_step_only: bool = False
) -> RoundSchedule:
    """Return the schedule of the one round in which all clients' gradients are measured."""
    name, is_parallel = "diagnostics_scheduler", group_state.group.runs_parallel
    schedules = _build_schedules(
        group_state, name, range(1), capacity=1, first_step_only=first_step_only
    )
    return jax.tree.map(lambda a: a[:, 0] if is_parallel else a[0], schedules)


def _build_schedules(
    group_state: GroupState,
    name: str,
    rounds: range,
    *,
    capacity: int | None = None,
    first_step_only: bool = False,
    num_rows: int | None = None,
) -> RoundSchedule:
    """Return the rounds of a call as the scheduler `name` of every slot plans them.

    The schedules are padded to `[capacity, ...]`, with a leading axis where runs are parallel.
    `num_rows` is the size of the table of client states on the devices, if others are on the host.
    """
    group, plan = group_state.group, group_state.group.program.plan
    schedulers = [getattr(run, name) for run in group_state.slots]
    capacity, schedules = capacity or group_state.limits.max_rounds, []
    for first in range(0, len(schedulers), plan.num_parallel):
        parallel = schedulers[first : first + plan.num_parallel]
        made = _make_rounds(parallel, group.shapes[name], rounds, first_step_only=first_step_only)
        schedules += [stack_rounds(run_rounds, capacity) for run_rounds in made]
    if num_rows is not None:
        for i, (schedule, scheduler) in enumerate(zip(schedules, schedulers, strict=True)):
            work_ids = scheduler.trained_work_ids(np.unique(schedule.round))
            schedules[i] = with_state_rows(schedule, work_ids, num_rows)
    if not group.runs_parallel:
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


def check_method_contract(group_state: GroupState) -> None:
    """Raise ContractError, before anything compiles, if the method's functions break the contract.

    See `algorithms.checks.validate_algorithm`. Cost: nothing, as the traces are kept for when the
    programs are compiled.
    """
    for program, inputs in group_state.list_programs().values():
        jax.eval_shape(program, *inputs)


def compute_state_shapes(group_state: GroupState) -> Any:
    """Return the states of all runs before the first round, as shapes placed like the states."""
    group, program = group_state.group, group_state.group.program
    plan, init = program.plan, functools.partial(program.init, group_state.limits.num_rows)
    hp, keys = group_state.cached_inputs["hp"], group_state.build_keys(Stream.INIT)

    def with_sharding(tree, kind):
        sharding = plan.sharding(PER_RUN if group.runs_parallel else kind)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    return plan.map_state(jax.eval_shape(init, hp, keys), with_sharding)


def init_states(group_state: GroupState) -> None:
    """Make the states before the first round, at the place that the plan gives them."""
    group, plan = group_state.group, group_state.group.program.plan
    num_rows, slots = group_state.limits.num_rows, group_state.slots
    arguments = [group_state.cached_inputs["hp"], group_state.build_keys(Stream.INIT)]
    if group.initial_model is not None:
        arguments.append(group.stack_slots([group.initial_model.variables] * len(slots)))
    state = group.program.init(1 if group_state.has_paged_states else num_rows, *arguments)
    if group_state.has_paged_states:
        schedulers = [run.scheduler for run in slots]
        group_state.pager = StatePager(plan, schedulers, state.clients, num_rows)
        state = state._replace(clients=())
    group_state.state = state if group.runs_parallel else plan.map_state(state, plan.put)


def measure_required_memory(group_state: GroupState) -> int:
    """Compile the programs and return the bytes that they need on each device.

    No array is allocated.
    """
    return max(compute_compiled_bytes(*program) for program in group_state.list_programs().values())
