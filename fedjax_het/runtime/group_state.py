"""Runs that go in step: what they keep while they are advanced, and how they begin."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, ServerStage
from fedjax_het.core.autotune.search import LaneChoice
from fedjax_het.core.execution_plan import LANES_AXIS, PER_RUN, ExecutionPlan
from fedjax_het.core.memory import compute_compiled_bytes
from fedjax_het.core.rng import Stream
from fedjax_het.core.round_program import ChunkInputs
from fedjax_het.core.schedule import compute_useful_fraction
from fedjax_het.core.state_paging import StatePager
from fedjax_het.data import Dataset, PartitionSummary, ServerSummary
from fedjax_het.data.server_data import LabeledImages
from fedjax_het.runtime.compiled_programs import CompiledPrograms, compute_client_state_bytes
from fedjax_het.runtime.early_stopping import EarlyStop
from fedjax_het.runtime.history import Curves, Timing, build_curves
from fedjax_het.runtime.placement import DEVICE_STATE, HOST_STATE
from fedjax_het.runtime.prepared_run import GroupShapes, PreparedRun
from fedjax_het.runtime.program_inputs import InputContext, build_chunk_inputs, build_run_inputs
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


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Federations that the same programs serve, `program.plan.capacity` of them at a time."""

    program: CompiledPrograms
    prepared_runs: list[PreparedRun]
    context: InputContext  # of what the programs read
    shared_inputs: dict[str, Any]  # the part of it that is the same for all
    lane_choice: LaneChoice
    client_state: str = DEVICE_STATE

    @property
    def plan(self) -> ExecutionPlan:
        return self.program.plan

    @property
    def dataset(self) -> Dataset:
        return self.context.dataset

    @property
    def pool(self) -> LabeledImages | None:
        """What the server's examples are from besides those of training."""
        return self.context.pool

    @property
    def shapes(self) -> GroupShapes:
        return self.context.shapes

    def summarize_partition(self, prepared_run: PreparedRun) -> PartitionSummary:
        """A federation's partition in numbers."""
        return prepared_run.partition.summarize(self.dataset.train_labels, self.dataset.num_classes)

    def summarize_server_data(self, prepared_run: PreparedRun) -> ServerSummary | None:
        """The server's examples in numbers; None where it has none."""
        if prepared_run.server_data is None:
            return None
        return prepared_run.server_data.summarize(self.dataset, prepared_run.partition, self.pool)

    def useful_work_fraction(self, prepared_runs: Sequence[PreparedRun]) -> float:
        """Share of the samples that the lanes of these, in step, run through which are clients'."""
        schedulers = [f.scheduler for f in prepared_runs]
        return compute_useful_fraction(schedulers, is_concurrent=self.plan.mesh_axis == LANES_AXIS)


@dataclass(eq=False)
class GroupState:
    """Runs of one group that go in step, and where they stand.

    federations: as many as run at once, or fewer. source, kept: of what their program reads, and
    the part that stays the same. state: of all of them, on the devices. pager: of their clients'
    states, where those are on the host. stopped: of each run that diverged, the round, or how many
    were done where work between rounds did. early: how each ended that was ended before its last
    round. given: those whose results are made, while others go on. pause: calls end at multiples of
    so many rounds, where something may be decided.
    """

    group: RunGroup
    prepared_runs: list[PreparedRun]
    context: InputContext
    cached_inputs: dict[str, Any]
    limits: ChunkLimits
    curves: list[Curves]  # of each
    timing: Timing
    progress: Callable[[Progress], None]
    state: Any = None
    pager: StatePager | None = None
    rounds_done: int = 0  # rounds
    round_progress: RoundProgress | None = None  # the next round, where it has begun
    force_resumable: bool = False  # whether rounds are cut, long or not
    diverged_rounds: list[int | None] = field(
        default_factory=list
    )  # of each: the round it diverged in
    early_stops: dict[int, EarlyStop] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    pause_every: int | None = None
    begun_under: dict[int, dict] = field(
        default_factory=dict
    )  # of those begun elsewhere: its names

    @property
    def plan(self) -> ExecutionPlan:
        return self.group.plan

    @property
    def algorithm(self) -> Algorithm:
        return self.group.program.algorithm

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
        return self.context.runs_parallel or self.plan.server_parallelism.axis is not None

    @functools.cached_property
    def loop_layout(self) -> LoopLayout | None:
        """How a round is cut, if it is long; else None.

        Traces the rounds' program, which is kept for when it is compiled. Raises ContractError.
        """
        program, inputs = (
            self.group.program,
            (compute_state_shapes(self), self.build_first_step_inputs()),
        )
        jax.eval_shape(program.chunk.program, *inputs)
        if not (self.force_resumable or is_long_round(program, inputs[1])):
            return None
        return trace_loop_layout(program, *inputs)

    def build_keys(self, stream: Stream) -> jax.Array:
        return self.context.build_keys(stream)

    def build_chunk_inputs(self, first: int, count: int) -> ChunkInputs:
        """What the program reads for rounds `first .. first+count-1`."""
        context = dataclasses.replace(self.context, rounds=range(first, first + count))
        return build_chunk_inputs(context, self.cached_inputs)

    def build_first_step_inputs(self) -> ChunkInputs:
        """The same for the first step of every lane of the next round, and of an evaluation."""
        next_round = min(self.rounds_done, self.total_rounds - 1)
        rounds = range(next_round, next_round + 1)
        return build_chunk_inputs(
            dataclasses.replace(self.context, rounds=rounds, first_step_only=True),
            self.cached_inputs,
        )

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
        if not self.context.runs_parallel:
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
        runs_parallel = self.context.runs_parallel
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
    """Runs of a group that are to go in step: nothing is allocated for their states yet.

    Args:
      federations: as many as run at once, or fewer.
      started: when their wall-clock began (default: now).
      records: of the checkpoints that they are to go on from.
    """
    assert len(prepared_runs) <= group.plan.max_parallel_runs
    prepared_runs = list(prepared_runs)
    # An idle place does the last federation's work once more, or nothing.
    slots = prepared_runs + prepared_runs[-1:] * (group.plan.max_parallel_runs - len(prepared_runs))
    limits = _compute_chunk_limits(group, prepared_runs)
    context = dataclasses.replace(
        group.context,
        slots=slots,
        num_runs=len(prepared_runs),
        num_rows=limits.num_rows if group.client_state == HOST_STATE else None,
        capacity=limits.max_rounds,
    )
    program, rounds = group.program, prepared_runs[0].spec.rounds
    return GroupState(
        group,
        prepared_runs,
        context,
        cached_inputs=group.shared_inputs | build_run_inputs(context),
        limits=limits,
        curves=[
            build_curves(
                program.evaluation.missing_metrics(program.algorithm, rounds),
                group.dataset,
                f.partition,
                f.client_tests,
                program.evaluation.metrics,
            )
            for f in prepared_runs
        ],
        timing=Timing() if start_time is None else Timing(start_time=start_time),
        progress=progress or (lambda progress: None),
        diverged_rounds=[None] * len(prepared_runs),
        force_resumable=any(record.get("within") for record in records),
    )


def _compute_chunk_limits(group: RunGroup, prepared_runs: Sequence[PreparedRun]) -> ChunkLimits:
    """As many rounds as schedules, and client states on the host, leave room for."""
    spec, plan, shapes = prepared_runs[0].spec, group.plan, group.shapes
    schedule_shapes = [shape for shape in (shapes.schedule, shapes.tuning) if shape is not None]
    bytes_per_round = sum(shape.num_bytes(spec.batch_size) for shape in schedule_shapes)
    max_rounds = MAX_SCHEDULE_BYTES // (bytes_per_round * plan.max_parallel_runs)
    num_prefetch = 2 if max_rounds else 1
    cohort_size, num_clients = 0, group.program.evaluation.num_clients
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
    plan, init = group_state.plan, group_state.group.program.init(group_state.limits.num_rows)
    shapes = jax.eval_shape(
        init, group_state.cached_inputs["hp"], group_state.build_keys(Stream.INIT)
    )

    def with_sharding(tree, kind):
        sharding = plan.sharding(PER_RUN if group_state.context.runs_parallel else kind)
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
            group_state.context.stack_slots(
                [initial_model.variables] * len(group_state.context.slots)
            )
        )
    state = group_state.group.program.init(
        1 if group_state.has_paged_states else group_state.limits.num_rows
    )(*init_arguments)
    if group_state.has_paged_states:
        schedulers = [f.scheduler for f in group_state.context.slots]
        group_state.pager = StatePager(
            group_state.plan, schedulers, state.clients, group_state.limits.num_rows
        )
        state = state._replace(clients=())
    group_state.state = (
        state
        if group_state.context.runs_parallel
        else group_state.plan.map_state(state, group_state.plan.put)
    )


def measure_required_memory(group_state: GroupState) -> int:
    """Bytes that the programs, which this compiles, need on each device. Nothing is allocated for
    it."""
    return max(compute_compiled_bytes(*program) for program in group_state.list_programs().values())
