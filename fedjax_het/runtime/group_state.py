"""The state of runs that go in step, and its initialization."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import ServerStage
from fedjax_het.core.execution_plan import PER_RUN
from fedjax_het.core.memory import compute_compiled_bytes
from fedjax_het.core.rng import Stream
from fedjax_het.core.round_program import ChunkInputs
from fedjax_het.core.state_paging import StatePager
from fedjax_het.runtime.compiled_programs import compute_client_state_bytes
from fedjax_het.runtime.early_stopping import EarlyStop
from fedjax_het.runtime.history import Curves, Timing, build_curves
from fedjax_het.runtime.placement import HOST_STATE
from fedjax_het.runtime.prepared_run import PreparedRun, RunGroup
from fedjax_het.runtime.program_inputs import (
    RUN_INPUTS,
    InputContext,
    build_chunk_inputs,
    build_inputs,
    with_zero_rounds,
)
from fedjax_het.runtime.progress import Progress
from fedjax_het.runtime.resumable_rounds import (
    LoopLayout,
    RoundProgress,
    is_long_round,
    trace_loop_layout,
)
from fedjax_het.utils.arrays import fetch_to_host

MAX_ROUNDS_PER_CHUNK = 16  # rounds per call of the compiled program, at most
MAX_SCHEDULE_BYTES = 2**26  # of the rounds of a call, unless one alone takes more
MAX_CLIENT_TABLE_BYTES = (
    2**26
)  # likewise of client states where they are moved to the devices and back


class ChunkLimits(NamedTuple):
    """What a call of the rounds' program has room for."""

    max_rounds: int
    num_rows: int  # client states on the devices
    num_prefetch: int = 1  # calls whose inputs are there before they are due


@dataclass(eq=False)
class GroupState:
    """The state of runs of one group that go in step.

    Attributes:
      group: the runs that share the programs, with their data.
      prepared_runs: the runs that go in step, at most one for each slot of the plan.
      cached_inputs: the inputs of the programs that stay the same, by name.
      limits: the rounds and client states that a call of the program has room for.
      curves: the metrics of each run.
      timing: seconds, and the rounds that were timed.
      progress: called between calls of the programs.
      state: the states of all runs, on the devices.
      pager: client states, where they are on the host.
      rounds_done: number of rounds that are done.
      round_progress: the parts of the next round that are done, where it is split into parts.
      force_resumable: whether rounds are split into parts, however long they take.
      diverged_rounds: of each run, the round in which it diverged, or the number of rounds done if
        server training between rounds diverged; None for a run that did not diverge.
      early_stops: how runs ended that were ended before their last round.
      reported: the runs whose results exist, while others go on.
      pause_every: calls end at multiples of so many rounds (default: anywhere).
      begun_under: version, device and precision of runs that were begun under others.
    """

    group: RunGroup
    prepared_runs: list[PreparedRun]
    cached_inputs: dict[str, Any]
    limits: ChunkLimits
    curves: list[Curves]
    timing: Timing
    progress: Callable[[Progress], None]
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
        """The run of each slot of the plan; an idle slot repeats the last run."""
        return fill_slots(self.group, self.prepared_runs)

    @property
    def total_rounds(self) -> int:
        """From the first to the last."""
        return self.prepared_runs[0].spec.rounds

    @property
    def active(self) -> list[int]:
        """Those that have neither diverged nor been ended early."""
        indices = range(len(self.prepared_runs))
        return [i for i in indices if self.diverged_rounds[i] is None and i not in self.early_stops]

    def rounds_completed(self, i: int) -> int:
        """How many rounds of a run took place so far."""
        if i in self.early_stops:
            return self.early_stops[i].round
        diverged_round = self.diverged_rounds[i]
        return self.rounds_done if diverged_round is None else diverged_round

    @property
    def has_paged_states(self) -> bool:
        return self.group.client_state == HOST_STATE

    @property
    def shards_server_stages(self) -> bool:
        """Whether work between rounds is where the rounds are: every run's on its own device, or
        shared by the devices; else it is on one device."""
        plan = self.group.program.plan
        return self.group.runs_parallel or plan.server_parallelism.axis is not None

    @functools.cached_property
    def loop_layout(self) -> LoopLayout | None:
        """How a round is cut, if it is long; else None.

        Traces the rounds' program, which is kept for when it is compiled. Raises ContractError.
        """
        if self.group.program.plan.is_debug:
            return None
        program, inputs = (
            self.group.program,
            (compute_state_shapes(self), self.build_first_step_inputs()),
        )
        jax.eval_shape(program.chunk.program, *inputs)
        if not (self.force_resumable or is_long_round(program, inputs[1])):
            return None
        return trace_loop_layout(program, *inputs)

    def build_keys(self, stream: Stream) -> jax.Array:
        """Return the key of every slot's run."""
        return self._input_context().build_keys(stream)

    def build_chunk_inputs(self, first: int, count: int) -> ChunkInputs:
        """Return the inputs of the program for rounds `first .. first + count - 1`."""
        context = self._input_context(range(first, first + count))
        return build_chunk_inputs(context, self.cached_inputs)

    def build_first_step_inputs(self) -> ChunkInputs:
        """Return the inputs for the first step of every lane of the next round and evaluation."""
        next_round = min(self.rounds_done, self.total_rounds - 1)
        context = self._input_context(range(next_round, next_round + 1))
        return build_chunk_inputs(replace(context, first_step_only=True), self.cached_inputs)

    def without_rounds(self, inputs: ChunkInputs) -> ChunkInputs:
        """Return these inputs, of which the program runs no round."""
        return with_zero_rounds(self._input_context(), inputs)

    def _input_context(self, rounds: range = range(0)) -> InputContext:
        return make_input_context(self.group, self.prepared_runs, self.limits, rounds)

    def load_client_states(self, rounds: Sequence[int]) -> None:
        """Put the states of these rounds' clients on the devices, if they are on the host."""
        if self.pager is not None:
            self.state = self.state._replace(clients=())  # makes room
            self.state = self.state._replace(clients=self.pager.load_table(rounds))

    def store_client_states(self, rounds: Sequence[int]) -> None:
        """Take them back when these rounds are done."""
        if self.pager is not None:
            self.pager.store_table(self.state.clients, rounds)

    def fetch_states(self) -> list[Any]:
        """Every run's state, on the host."""
        host = jax.tree.map(fetch_to_host, self.state)
        if not self.group.runs_parallel:
            return [host]
        return [jax.tree.map(lambda a, i=i: a[i], host) for i in range(len(self.prepared_runs))]

    def list_programs(self) -> dict[str, tuple[Any, tuple]]:
        """(jitted, its inputs: arrays, or shapes placed like them) of what the runs go through, by
        name."""
        programs, cached_inputs, state = (
            self.group.program,
            self.cached_inputs,
            compute_state_shapes(self),
        )
        inputs = (
            cached_inputs["hp"],
            state,
            self.build_keys(Stream.SERVER),
            jnp.int32(1),
            cached_inputs.get("server_examples"),
        )
        if not self.shards_server_stages:
            inputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
        stage_programs = {
            name: (stage.program, inputs) for name, stage in programs.server_stages.items()
        }
        round_program: tuple[Any, tuple] = (
            programs.chunk.program,
            (state, self.build_first_step_inputs()),
        )
        if (layout := self.loop_layout) is not None:
            initial_loop_inputs = layout.build_spans(0), layout.carry_shapes
            round_program = (
                programs.partial_round.program,
                (*round_program[1], *initial_loop_inputs),
            )
        return {"rounds": round_program, **stage_programs}

    def stage_iterations_done(self, stage: ServerStage) -> int:
        """Iterations of work between rounds, of each run."""
        runs_parallel = self.group.runs_parallel
        return stage.count_completed(
            jax.tree.map(lambda a: a[0], self.state) if runs_parallel else self.state
        )


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
      records: the records of the checkpoints from which they go on.
    """
    assert len(prepared_runs) <= group.program.plan.max_parallel_runs
    prepared_runs, limits = list(prepared_runs), _compute_chunk_limits(group, prepared_runs)
    context = make_input_context(group, prepared_runs, limits)
    evaluation, rounds = group.program.signature.evaluation, prepared_runs[0].spec.rounds
    return GroupState(
        group,
        prepared_runs,
        cached_inputs=group.shared_inputs | build_inputs(context, RUN_INPUTS),
        limits=limits,
        curves=[
            build_curves(
                evaluation.missing_metrics(group.program.algorithm, rounds),
                group.dataset,
                f.partition,
                f.client_tests,
                evaluation.metrics,
            )
            for f in prepared_runs
        ],
        timing=Timing() if start_time is None else Timing(start_time=start_time),
        progress=progress or (lambda progress: None),
        diverged_rounds=[None] * len(prepared_runs),
        force_resumable=any(record.get("within") for record in records),
    )


def fill_slots(group: RunGroup, prepared_runs: list[PreparedRun]) -> list[PreparedRun]:
    """Return the run of each slot of the plan: an idle slot repeats the last run's work, or idles."""
    num_idle = group.program.plan.max_parallel_runs - len(prepared_runs)
    return prepared_runs + prepared_runs[-1:] * num_idle


def make_input_context(
    group: RunGroup,
    prepared_runs: list[PreparedRun],
    limits: ChunkLimits,
    rounds: range = range(0),
) -> InputContext:
    """Return what inputs of these rounds are made of."""
    return InputContext(
        group,
        fill_slots(group, prepared_runs),
        num_runs=len(prepared_runs),
        num_rows=limits.num_rows if group.client_state == HOST_STATE else None,
        capacity=limits.max_rounds,
        rounds=rounds,
    )


def _compute_chunk_limits(group: RunGroup, prepared_runs: Sequence[PreparedRun]) -> ChunkLimits:
    """As many rounds as schedules, and client states on the host, leave room for."""
    spec, plan, shapes = prepared_runs[0].spec, group.program.plan, group.shapes
    schedule_shapes = [shape for shape in (shapes.schedule, shapes.tuning) if shape is not None]
    bytes_per_round = sum(shape.num_bytes(spec.batch_size) for shape in schedule_shapes)
    max_rounds = MAX_SCHEDULE_BYTES // (bytes_per_round * plan.max_parallel_runs)
    num_prefetch = 2 if max_rounds else 1
    cohort_size, num_clients = 0, group.program.signature.evaluation.num_clients
    if group.client_state == HOST_STATE:
        cohort_size = max(f.scheduler.cohort_size for f in prepared_runs)
        row_bytes = compute_client_state_bytes(group.program, spec)
        max_rounds = min(
            max_rounds, MAX_CLIENT_TABLE_BYTES // (row_bytes * cohort_size * plan.num_parallel)
        )
    rounds = max(1, min(MAX_ROUNDS_PER_CHUNK, spec.rounds, max_rounds))
    num_rows = min(num_clients, rounds * cohort_size) if cohort_size else num_clients
    return ChunkLimits(rounds, num_rows, num_prefetch)


def check_method_contract(group_state: GroupState) -> None:
    """Raise ContractError, before anything compiles, if the method's functions do not do what they
    are to do: see `algorithms.checks.validate_algorithm`.

    Cost: nothing, as the traces are kept for when the programs are compiled.
    """
    for program, inputs in group_state.list_programs().values():
        jax.eval_shape(program, *inputs)


def compute_state_shapes(group_state: GroupState) -> Any:
    """The states of all runs before the first round, as shapes placed like them."""
    plan, init = (
        group_state.group.program.plan,
        group_state.group.program.init(group_state.limits.num_rows),
    )
    shapes = jax.eval_shape(
        init, group_state.cached_inputs["hp"], group_state.build_keys(Stream.INIT)
    )

    def with_sharding(tree, kind):
        sharding = plan.sharding(PER_RUN if group_state.group.runs_parallel else kind)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    return plan.map_state(shapes, with_sharding)


def init_states(group_state: GroupState) -> None:
    """Make the states before the first round, where they are to be."""
    init_arguments: list[Any] = [
        group_state.cached_inputs["hp"],
        group_state.build_keys(Stream.INIT),
    ]
    if (
        initial_model := group_state.prepared_runs[0].initial_model
    ) is not None:  # the same of all, see `compute_static_key`
        init_arguments.append(
            group_state.group.stack_slots([initial_model.variables] * len(group_state.slots))
        )
    state = group_state.group.program.init(
        1 if group_state.has_paged_states else group_state.limits.num_rows
    )(*init_arguments)
    if group_state.has_paged_states:
        schedulers = [f.scheduler for f in group_state.slots]
        group_state.pager = StatePager(
            group_state.group.program.plan, schedulers, state.clients, group_state.limits.num_rows
        )
        state = state._replace(clients=())
    group_state.state = (
        state
        if group_state.group.runs_parallel
        else group_state.group.program.plan.map_state(state, group_state.group.program.plan.put)
    )


def measure_required_memory(group_state: GroupState) -> int:
    """Bytes that the programs, which this compiles, need on each device. Nothing is allocated for
    it."""
    return max(compute_compiled_bytes(*program) for program in group_state.list_programs().values())
