"""The state of runs that advance together, and the inputs of their programs.

A new input needs three additions:

* a field in `core.round_inputs.ChunkInputs`, where rounds read it,
* a line in `compiled_programs._get_input_kinds`, which names the programs that read it,
* a function: in `build._place_shared_inputs` for inputs of all runs of a group, in
  `build_run_inputs` for constant inputs of a run, in `_build_call_inputs` for inputs of a call.

An input that only one method reads is an `algorithms.base.RoundInput` of the method.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import ServerStage
from fedjax_het.core.client_loop import Examples, RoundSchedule, SkewedExamples
from fedjax_het.core.evaluation import (
    ClientTestsShape,
    compute_client_tests_shape,
    compute_test_batches,
    make_client_tests,
    make_validation_set,
)
from fedjax_het.core.execution_plan import PER_BLOCK, PER_DEVICE
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.core.round_evaluation import CLIENT_LOSS_NAME
from fedjax_het.core.round_inputs import ChunkInputs
from fedjax_het.core.schedule import AdaptiveScheduler, round_up_size, with_example_rows
from fedjax_het.core.state_paging import StatePager
from fedjax_het.data import Dataset
from fedjax_het.runtime.build import PreparedRun, RunGroup
from fedjax_het.runtime.candidate_losses import CANDIDATE_LOSS_NAME, measure_candidate_losses
from fedjax_het.runtime.history import VALIDATION_MEAN, Curves, EarlyStop, Timing
from fedjax_het.runtime.placement import HOST_DATA, PAGED_STATES
from fedjax_het.runtime.progress import START, Progress
from fedjax_het.runtime.resumable_rounds import LoopLayout, RoundProgress
from fedjax_het.runtime.schedules import build_schedules, place_schedules
from fedjax_het.runtime.split_measures import (
    SplitMeasures,
    list_split_metrics,
    measure_assignment,
)
from fedjax_het.utils.arrays import fetch_to_host
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.input_kinds import map_arrays, take_rows
from fedjax_het.utils.memory_maps import gather_rows
from fedjax_het.utils.signals import defer_signals

MAX_ROUNDS_PER_CHUNK = 16  # rounds per call of the compiled program, at most
# Schedules of the rounds of a call take at most these bytes, unless one round alone takes more. The
# limit also applies to client states that are moved to the devices and back for the call, and to
# examples that are moved to the devices.
MAX_SCHEDULE_BYTES = MAX_CLIENT_TABLE_BYTES = MAX_EXAMPLE_TABLE_BYTES = 2**26


class ChunkLimits(NamedTuple):
    """Capacity of a call of the rounds' program.

    Attributes:
      max_rounds: number of rounds.
      num_rows: number of client states on the devices.
      num_examples: number of training examples on the devices.
      num_prefetch: number of calls whose inputs are made before they are due.
    """

    max_rounds: int
    num_rows: int
    num_examples: int
    num_prefetch: int = 1


def compute_chunk_limits(group: RunGroup, prepared_runs: Sequence[PreparedRun]) -> ChunkLimits:
    """Return the most rounds for which schedules, client states and examples leave room.

    Args:
      group: the runs that share the programs.
      prepared_runs: the runs that advance together.

    Returns:
      The capacity of a call.
    """
    spec, plan, shapes = prepared_runs[0].spec, group.program.plan, group.shapes
    names = [name for name in ("scheduler", "tuning_scheduler") if name in shapes]
    bytes_per_round = sum(shapes[name].num_bytes(spec.batch_size) for name in names)
    max_rounds = MAX_SCHEDULE_BYTES // (bytes_per_round * plan.max_parallel_runs)
    cohort_size = examples_per_round = 0
    if group.client_data == HOST_DATA:
        examples_per_round = plan.max_parallel_runs * max(
            run.scheduler.max_cohort_examples for run in group.prepared_runs
        )
        table_bytes = examples_per_round * _count_example_bytes(prepared_runs[0].dataset)
        max_rounds = min(max_rounds, MAX_EXAMPLE_TABLE_BYTES // max(1, table_bytes))
    num_prefetch = 2 if max_rounds else 1
    if group.client_state in PAGED_STATES:
        cohort_size = max(run.scheduler.cohort_size for run in prepared_runs)
        table_bytes = group.state_bytes * cohort_size * plan.num_parallel  # of one round
        max_rounds = min(max_rounds, MAX_CLIENT_TABLE_BYTES // table_bytes)
    if group.program.signature.evaluation.records_client_losses:
        max_rounds, num_prefetch = 1, 0  # a round is planned after the round before
    rounds = max(1, min(MAX_ROUNDS_PER_CHUNK, spec.rounds, max_rounds))
    num_clients = group.program.signature.evaluation.num_clients
    num_rows = min(num_clients, rounds * cohort_size) if cohort_size else num_clients
    num_examples = len(prepared_runs[0].dataset.train_labels)
    if group.client_data == HOST_DATA:  # padding of batches reads the first example
        num_examples = min(num_examples, round_up_size(rounds * examples_per_round + 1))
    return ChunkLimits(rounds, num_rows, num_examples, num_prefetch)


def _count_example_bytes(dataset: Dataset) -> int:
    """Return the bytes of one training example."""
    arrays = jax.tree.leaves((dataset.train_inputs, dataset.train_labels))
    return sum(array.nbytes // len(array) for array in arrays)


class Snapshot(NamedTuple):
    """The state of runs that advance together, and their progress, which one assignment replaces.

    Attributes:
      state: the states of all runs, on the devices; None while they are replaced.
      rounds_done: number of rounds that are done.
      round_progress: the finished parts of the next round, if it is split into parts.
      diverged_rounds: of each run, the round in which it diverged, or the number of rounds done if
        server training between rounds diverged; None for a run that did not diverge.
      early_stops: reasons of runs that ended before their last round.
      unreported_phase: the phase with which callbacks are to be called; None if they were called.
    """

    state: Any
    rounds_done: int
    round_progress: RoundProgress | None
    diverged_rounds: tuple[int | None, ...]
    early_stops: Mapping[int, EarlyStop]
    unreported_phase: str | None


@dataclass(eq=False)
class GroupState:
    """The runs of one group in lockstep, with their state.

    The programs take the buffers of the state. A signal between such a call and the next snapshot
    waits, see `utils.signals.defer_signals`. After an error there the runs cannot continue.

    Attributes:
      group: the runs that share the programs, with their data.
      prepared_runs: the runs that advance together, at most one for each slot of the plan.
      limits: the rounds and client states that a call of the program has room for.
      curves: the metrics of each run.
      timing: seconds, and the rounds that were timed.
      progress: called between calls of the programs.
      cached_inputs: the constant inputs of the programs, by name.
      snapshot: the state, the progress and the ends of the runs.
      pager: client states on the host, if they are there.
      loop_layout: the loops at which a round is split into parts; None if rounds are whole.
      reported: the runs whose results are written, while other runs continue.
      pause_every: calls end at multiples of this number of rounds (default: anywhere).
      records: the records of the checkpoints from which the runs resume; empty if they begin.
      begun_under: version, device and precision of runs that began in another environment.
      split_measures: measures of the clients' data of each run that requests them.
    """

    group: RunGroup
    prepared_runs: list[PreparedRun]
    limits: ChunkLimits
    curves: list[Curves]
    timing: Timing
    progress: Callable[[Progress], None]
    cached_inputs: dict[str, Any] = field(default_factory=dict)
    snapshot: Snapshot = field(init=False)
    pager: StatePager | None = None
    loop_layout: LoopLayout | None = None
    reported: set[int] = field(default_factory=set)
    pause_every: int | None = None
    records: Sequence[dict] = ()
    begun_under: dict[int, dict] = field(default_factory=dict)
    split_measures: dict[int, SplitMeasures] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.snapshot = Snapshot(None, 0, None, (None,) * len(self.prepared_runs), {}, START)

    @property
    def state(self) -> Any:
        """The states of all runs, on the devices."""
        return self.snapshot.state

    @property
    def rounds_done(self) -> int:
        """Number of rounds that are done."""
        return self.snapshot.rounds_done

    @property
    def round_progress(self) -> RoundProgress | None:
        """The finished parts of the next round, if it is split into parts."""
        return self.snapshot.round_progress

    @property
    def diverged_rounds(self) -> tuple[int | None, ...]:
        """The round in which each run diverged, or None; see `Snapshot`."""
        return self.snapshot.diverged_rounds

    @property
    def early_stops(self) -> Mapping[int, EarlyStop]:
        """Reasons of runs that ended before their last round."""
        return self.snapshot.early_stops

    def update(self, **changes: Any) -> None:
        """Replace fields of the snapshot, in one assignment."""
        self.snapshot = self.snapshot._replace(**changes)

    def plan_rounds(self, *, from_start: bool = False) -> None:
        """Plan the rounds up to the next one, where clients are selected by losses.

        Args:
          from_start: whether all rounds are planned anew from the curves.
        """
        last = min(self.rounds_done, self.total_rounds - 1)
        for i, curves in enumerate(self.curves):
            scheduler = self.prepared_runs[i].scheduler
            if not isinstance(scheduler, AdaptiveScheduler):
                continue
            with defer_signals():  # a signal within the simulation would end it
                if from_start:
                    scheduler.restart(functools.partial(self._measure_losses, i))
                while (r := scheduler.num_planned) <= last:
                    scheduler.plan_next_round(curves[CLIENT_LOSS_NAME][r - 1])

    def _measure_losses(
        self, i: int, round_index: int, candidates: np.ndarray, loss_reports: str
    ) -> np.ndarray:
        """Return the losses of the candidates of a round, and record them, see `MeasureLosses`.

        Rounds that have begun have their losses in the curves, so that a resumed run repeats its
        selections.
        """
        run, program, state = self.prepared_runs[i], self.group.program, self.state
        losses = self.curves[i][CANDIDATE_LOSS_NAME][round_index]
        if round_index < self.rounds_done or self.round_progress is not None:
            return losses
        if program.algorithm.can_page_state:  # the model does not depend on states of clients
            state = state._replace(clients=())
        state = self.group.take_run(jax.tree.map(fetch_to_host, state), i)
        assert program.algorithm.global_model is not None
        examples = self.cached_inputs["examples"]
        if "skew" in self.cached_inputs:
            skew = run.make_skew_inputs(1)
            examples = SkewedExamples(examples.inputs, skew.train_labels, skew.transform)
        losses[:] = np.nan
        losses[candidates] = measure_candidate_losses(
            program.signature.training.task,
            program.algorithm.global_model(state),
            examples,
            run.scheduler.work_items,
            run.spec,
            round_index=round_index,
            candidates=candidates,
            loss_reports=loss_reports,
        )
        return losses

    def end_run(self, i: int, early_stop: EarlyStop) -> None:
        """End a run before its last round.

        Args:
          i: index of the run.
          early_stop: the round, the cause and the reason.
        """
        self.update(early_stops={**self.early_stops, i: early_stop})

    def require_state(self) -> None:
        """Raise ConfigError if an error interrupted the replacement of the state."""
        carry = None if self.round_progress is None else self.round_progress.carry
        leaves = [a for a in jax.tree.leaves((self.state, carry)) if isinstance(a, jax.Array)]
        if self.state is None or any(leaf.is_deleted() for leaf in leaves):
            raise ConfigError(
                f"rounds: the run cannot continue after round {self.rounds_done}, since an error "
                "interrupted the replacement of its state: start it again, or resume it from its "
                "checkpoint in output_dir (resume=True, --resume)"
            )

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
        """Whether client states are on the host or on disk."""
        return self.group.client_state in PAGED_STATES

    @property
    def shards_server_stages(self) -> bool:
        """Whether the server's work between rounds is on the devices of the rounds.

        The work of every run is then on the run's own device, or shared by the devices. Else the
        work is on one device.
        """
        plan = self.group.program.plan
        return self.group.runs_parallel or plan.server_parallelism.axis is not None

    def get_accuracies(self, i: int, rounds_done: int | None = None) -> np.ndarray:
        """Return the accuracy that the stopping rules of a run read, in the rounds that are done.

        It is the global model's accuracy, otherwise the mean over clients, on validation examples
        if the run has any, otherwise on tests. Rounds without an evaluation have NaN.

        Args:
          i: index of the run.
          rounds_done: number of rounds (default: the rounds that are done).

        Returns:
          Shares, float `[rounds_done]`.
        """
        has_global_model = self.group.program.algorithm.global_model is not None
        if self.has_validation:
            name = "validation_accuracy" if has_global_model else VALIDATION_MEAN
        else:
            name = "test_accuracy" if has_global_model else "mean_client_accuracy"
        return self.curves[i][name][: self.rounds_done if rounds_done is None else rounds_done]

    @property
    def accuracy_name(self) -> str:
        """The accuracy that `get_accuracies` returns, in words."""
        program = self.group.program
        name = program.signature.training.task.kind.score_name
        name = f"validation {name}" if self.has_validation else name
        if program.algorithm.global_model is None:
            return f"mean {name} of clients"
        has_client_tests = program.signature.evaluation.has_client_tests
        return f"{name} of the global model" if has_client_tests else name

    @property
    def has_validation(self) -> bool:
        """Whether the runs have validation examples."""
        return self.group.program.signature.evaluation.has_validation

    def count_rounds_completed(self, i: int) -> int:
        """Return the number of rounds of a run that took place."""
        if i in self.early_stops:
            return self.early_stops[i].round
        diverged_round = self.diverged_rounds[i]
        return self.rounds_done if diverged_round is None else diverged_round

    def get_split_measures(self, i: int) -> SplitMeasures:
        """Return the measures of a run's clients, which are computed at the first call.

        Args:
          i: index of the run.

        Returns:
          The measures; without requested metrics only the measures of labels and sizes.
        """
        if i not in self.split_measures:
            run, model = self.prepared_runs[i], self.group.initial_model
            variables = None if model is None else model.variables
            metrics = list_split_metrics(run.spec)
            signature = self.group.program.signature
            self.split_measures[i] = measure_assignment(run, signature, variables, metrics)
        return self.split_measures[i]

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
        """Copy the states of the clients of these rounds to the devices, if states are paged."""
        if self.pager is not None:
            with defer_signals():
                state = self.state._replace(clients=())  # makes room
                self.update(state=None)
                self.update(state=state._replace(clients=self.pager.load_table(rounds)))

    def prefetch_client_states(self, first: int, count: int) -> None:
        """Begin to read the states of the clients of the next rounds, if they are on disk.

        Args:
          first: the first round.
          count: number of rounds; fewer are left at the end.
        """
        is_planned = first < self.total_rounds and self.limits.num_prefetch > 0
        if self.pager is not None and is_planned:
            self.pager.prefetch(range(first, min(first + count, self.total_rounds)))

    def store_client_states(self, clients: Any, rounds: Sequence[int]) -> None:
        """Copy the states of the clients of these rounds to the host, if they belong there.

        Args:
          clients: the states on the devices.
          rounds: the rounds.
        """
        if self.pager is not None:
            self.pager.store_table(clients, rounds)

    def fetch_state(self, i: int) -> Any:
        """Return the state of a run, on the host."""
        self.require_state()
        return self.group.take_run(jax.tree.map(fetch_to_host, self.state), i)

    def fetch_states(self) -> list[Any]:
        """Return the state of every run, on the host."""
        self.require_state()
        host = jax.tree.map(fetch_to_host, self.state)
        return [self.group.take_run(host, i) for i in range(len(self.prepared_runs))]

    def count_stage_iterations(self, stage: ServerStage) -> int:
        """Return the iterations of the server's work between rounds that are done."""
        return stage.count_completed(self.group.take_run(self.state, 0))


def build_run_inputs(group_state: GroupState) -> dict[str, Any]:
    """Return the inputs that do not change while the runs advance in lockstep, by name."""
    group, slots = group_state.group, group_state.slots
    plan, stack = group.program.plan, group.stack_slots
    pair_work = group.program.algorithm.condensation_work
    has_pairs = pair_work is not None and not pair_work.is_per_client
    ids_per_client = group.prepared_runs[0].dataset.num_classes if has_pairs else 1

    def stack_by_block(trees: Sequence[Any]) -> Any:
        return stack(trees) if group.runs_parallel else plan.put(trees[0], PER_BLOCK)

    def build_client_tests(name: str) -> Any:
        partitions = [getattr(run, name) for run in group.prepared_runs]
        shapes = [compute_client_tests_shape(plan, partition) for partition in partitions]
        shape = ClientTestsShape(*map(max, zip(*shapes, strict=True)))
        return stack_by_block([make_client_tests(plan, getattr(r, name), shape) for r in slots])

    def build_validation_set() -> Any:
        dataset, fraction = slots[0].dataset, slots[0].spec.validation or 0
        expected_size = math.ceil(fraction * len(dataset.train_labels))
        batch_size, _ = compute_test_batches(
            plan, take_rows(dataset.train_inputs, slice(expected_size))
        )
        max_size = max(len(run.validation.indices) for run in group.prepared_runs if run.validation)
        layout = {
            "num_batches": -(-max_size // (plan.blocks * batch_size)),
            "batch_size": batch_size,
        }
        validation_sets = [
            make_validation_set(
                plan, run.client_dataset.train_labels, run.validation.indices, **layout
            )
            for run in slots
            if run.validation
        ]
        return stack_by_block(validation_sets)

    return group.program.build_inputs(
        {
            "hp": lambda: stack([run.hp for run in slots]),
            "train_key": lambda: group_state.build_keys(Stream.TRAIN),
            "client_tests": lambda: build_client_tests("client_tests"),
            "client_validation": lambda: build_client_tests("validation"),
            "validation_set": build_validation_set,
            "server_examples": lambda: stack([run.server_examples for run in slots]),
            "diagnostics_schedule": lambda: _build_schedules(
                group_state, "diagnostics_scheduler", None
            ),
            "method_inputs": lambda: stack([run.method_inputs for run in slots]),
            "skew": lambda: stack([run.make_skew_inputs(ids_per_client) for run in slots]),
        }
    )


def _build_call_inputs(
    group_state: GroupState, rounds: range, *, first_step_only: bool = False
) -> dict[str, Any]:
    """Return the inputs that differ between calls, by name, padded to the capacity of a call.

    With `first_step_only` they have only the first step of every lane, to check its numbers.
    """
    group, limits = group_state.group, group_state.limits
    build = functools.partial(_build_schedules, group_state, first_step_only=first_step_only)

    def build_lr_factors() -> jax.Array:
        padding = np.ones(limits.max_rounds - len(rounds), np.float32)
        factors = [run.lr_factors[list(rounds)] for run in group_state.slots]
        return group.stack_slots([np.append(factor, padding) for factor in factors])

    schedules = _plan_schedules(group_state, "scheduler", rounds, first_step_only=first_step_only)
    builders: dict[str, Callable[[], Any]] = {}
    if group.client_data == HOST_DATA:
        schedules, positions = with_example_rows(schedules, limits.num_examples)
        builders["examples"] = lambda: _place_examples(group_state, positions)
    builders |= {
        "schedule": lambda: place_schedules(schedules, group.program.plan),
        "lr_factors": build_lr_factors,
        "num_rounds": lambda: _place_num_rounds(group_state, len(rounds)),
        "tuning_schedule": lambda: build("tuning_scheduler", rounds),
    }
    if first_step_only:
        builders["num_eval_batches"] = lambda: group.program.plan.put(jnp.int32(1))
        builders["diagnostics_schedule"] = lambda: build("diagnostics_scheduler", None)
    return group.program.build_inputs(builders)


def _place_num_rounds(group_state: GroupState, count: int) -> jax.Array:
    """Return the number of rounds of a call, for every device that has a run."""
    plan = group_state.group.program.plan
    if not group_state.group.runs_parallel:
        return plan.put(jnp.int32(count))
    device_starts = np.arange(0, plan.max_parallel_runs, plan.num_parallel)
    is_used = device_starts < len(group_state.prepared_runs)
    return plan.put(np.int32(count) * is_used, PER_DEVICE)


def _place_examples(group_state: GroupState, positions: np.ndarray) -> Examples:
    """Return the table of training examples of a call, on the devices; its end is padding."""
    dataset, num_rows = group_state.prepared_runs[0].dataset, group_state.limits.num_examples

    def pad_rows(array: np.ndarray) -> np.ndarray:
        table = np.zeros((num_rows, *array.shape[1:]), array.dtype)
        table[: len(array)] = array
        return table

    inputs = map_arrays(pad_rows, gather_rows(dataset.train_inputs, positions))
    labels = pad_rows(dataset.train_labels[positions])
    return group_state.group.program.plan.put(Examples(inputs, labels))


def _plan_schedules(
    group_state: GroupState, name: str, rounds: range, *, first_step_only: bool = False
) -> list[RoundSchedule]:
    """Return the rounds of a call as the scheduler `name` of every slot plans them, on the host."""
    group, limits = group_state.group, group_state.limits
    is_paged = group_state.has_paged_states and name == "scheduler"
    return build_schedules(
        [getattr(run, name) for run in group_state.slots],
        rounds,
        group.shapes[name],
        group.program.plan,
        capacity=1 if name == "diagnostics_scheduler" else limits.max_rounds,
        num_rows=limits.num_rows if is_paged else None,
        first_step_only=first_step_only,
    )


def _build_schedules(
    group_state: GroupState, name: str, rounds: range | None, *, first_step_only: bool = False
) -> RoundSchedule:
    """Return the rounds of a call as the scheduler `name` of every slot plans them.

    Without `rounds` the scheduler plans a single round that serves whenever it is due, without an
    axis of rounds.
    """
    group = group_state.group
    schedules = place_schedules(
        _plan_schedules(group_state, name, rounds or range(1), first_step_only=first_step_only),
        group.program.plan,
    )
    if rounds is not None:
        return schedules
    return jax.tree.map(lambda a: a[:, 0] if group.runs_parallel else a[0], schedules)
