"""The host's half of a round: who takes part, in which order their samples come, on which lane.

Everything is drawn with NumPy from (seed, round, client id), so every method of a comparison
sees the same clients and the same minibatches. Clients are sequences of minibatch steps; they
are packed on lanes of nearly equal length instead of being padded to the longest. Where clients
condense data, the lanes run through pairs of a client and a class instead, see
`core.work_items`; "client" below then means such a pair.

Axes: D blocks of lanes (one per device, as a rule), V lanes per block, J client slots per lane, T
steps per lane, B batch, G segments, S sampled clients. A segment is a range of steps of one block
in which no client starts or ends. With one lane per block every client is one segment.
"""

import heapq
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_het.core.client_loop import RoundSchedule
from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.core.work_items import (
    ClientClassWork,
    ClientWork,
    DriftingWork,
    concatenate_aranges,
    find_present,
)
from fedjax_het.utils.cohorts import compute_cohort_size


class ScheduleShape(NamedTuple):
    """Static sizes that hold for every round of a run, or of several runs."""

    blocks: int
    "Blocks of lanes, D."
    lanes: int
    "Lanes per block, V."
    slots: int
    "Client slots per lane, J."
    steps: int
    "Steps per lane, T."
    segments: int
    "Segments per block, G."
    full_pass_batches: int = 0
    "Batches of the pass over all examples, M."

    def num_bytes(self, batch_size: int) -> int:
        """Return the bytes of the minibatches of one round."""
        return self.blocks * self.lanes * self.steps * batch_size * 4


class RoundPlan(NamedTuple):
    """The clients of a round, and the simulated time that the round takes."""

    clients: np.ndarray
    "Ids of the clients whose updates the server aggregates, at most S, int64 `[n]`."
    num_selected: int
    "Clients that receive the server's message."
    num_steps: np.ndarray | None = None
    "Minibatches of each of `clients`, `[n]`; None: all minibatches of the round."
    seconds: float | None = None
    "Simulated seconds of the round; None without simulated time."
    staleness: np.ndarray | None = None
    "Updates of the server since each of `clients` received its model, `[n]`; None: 0."


RoundPlans = Generator[RoundPlan, np.ndarray | None, None]
"""Plans of rounds. `send(losses)` returns the next plan; the losses are the clients' training
losses in the round before, float32 `[K]`, and NaN for clients that did not train."""

MeasureLosses = Callable[[int, np.ndarray, str], np.ndarray]
"""`measure_losses(round_index, candidates, loss_reports)` returns the losses of the global model
before the round on training examples of the candidates, float32 `[K]`, and NaN for other clients.
`loss_reports` is "all" or "minibatch", see `systems.AdaptiveSelection`."""


class WorkCounts(NamedTuple):
    """Amounts of work per round, `[R]` each."""

    participants: np.ndarray
    "Sampled clients that hold data and send an update."
    selected: np.ndarray
    "Sampled clients that hold data, and clients that send no update."
    pairs: np.ndarray
    "Pairs of client and class that they condense."
    samples: np.ndarray
    "Client samples processed."
    block_steps: np.ndarray
    "`[R, D]`: steps of each block's longest lane."
    seconds: np.ndarray | None = None
    "Simulated seconds; None without simulated time."


class _LaneAssignment(NamedTuple):
    """The work items of lanes: of one lane after the other, block after block."""

    work_ids: np.ndarray  # [N]
    num_steps: np.ndarray  # [N]
    counts: np.ndarray  # [number of lanes] work items of each lane

    @property
    def lane_starts(self) -> np.ndarray:
        """Steps before each lane, and of all lanes, `[number of lanes + 1]`."""
        return np.concatenate([[0], self.num_steps.cumsum()])[self._offsets]

    @property
    def ends(self) -> np.ndarray:
        """The step of its lane at which each work item ends, `[N]`."""
        return self.num_steps.cumsum() - np.repeat(self.lane_starts[:-1], self.counts)

    def split_blocks(self, num_lanes: int) -> list["_LaneAssignment"]:
        """Return the assignment of each block of `num_lanes` lanes."""
        bounds = itertools.pairwise(self._offsets[::num_lanes].tolist())
        counts = self.counts.reshape(-1, num_lanes)
        return [
            _LaneAssignment(self.work_ids[first:last], self.num_steps[first:last], block_counts)
            for (first, last), block_counts in zip(bounds, counts, strict=True)
        ]

    @property
    def _offsets(self) -> np.ndarray:
        """Work items before each lane, and of all lanes, `[number of lanes + 1]`."""
        return np.concatenate([[0], self.counts.cumsum()])


class RoundSettings(NamedTuple):
    """Settings of a run's rounds."""

    seed: int
    "Seed of the run."
    num_rounds: int = 1
    "Rounds of the run."
    participation: float = 1.0
    """Share of the clients sampled each round, uniformly without replacement, see
    `compute_cohort_size`. A sampled client without data is left out of the average."""
    averaging: str | None = "uniform"
    'Weights of the average: "uniform" or "weighted" (by samples); None where nothing is averaged.'
    eval_every: int = 1
    "Rounds between evaluations."
    max_cohort_size: int | None = None
    "Largest number of clients of a round, of plans; None: the number that `participation` gives."


class Scheduler:
    """Makes the schedule of any round of a run, in any order.

    Args:
      work_items: the work of the clients, and its minibatches.
      settings: settings of the rounds.
      blocks: blocks of lanes.
      lanes: lanes per block.
      plans: the clients of each round (default: the cohorts that `draw_cohort` draws).

    Attributes:
      shape: the sizes of the schedules.
      work_counts: the amounts of work per round.
      cohort_size: clients sampled each round, S.
      max_cohort_examples: number of examples that the clients of a round hold, at most.

    Example:
      >>> from fedjax_het.core.schedule import RoundSettings, Scheduler
      >>> from fedjax_het.core.work_items import ClientWork
      >>> from fedjax_het.data import partition_from_clients
      >>> partition = partition_from_clients([[0, 1, 2, 3], [4, 5], [6]])
      >>> work = ClientWork(partition, num_passes=1, batch_size=2)
      >>> scheduler = Scheduler(work, RoundSettings(seed=0), blocks=1, lanes=2)
      >>> schedule = scheduler.make_round(0)
      >>> schedule.client_ids[0].tolist()  # a lane for client 0, a lane for clients 1 and 2
      [[0, 3], [1, 2]]
      >>> schedule.batch_sizes[0].tolist()
      [[2, 2], [2, 1]]
    """

    def __init__(
        self,
        work_items: ClientWork | ClientClassWork | DriftingWork,
        settings: RoundSettings,
        blocks: int,
        lanes: int,
        plans: Sequence[RoundPlan] | None = None,
    ):
        self.work_items, self.settings, self._plans = work_items, settings, plans
        self.partition = partition = work_items.partition
        self.cohort_size = settings.max_cohort_size or compute_cohort_size(
            partition.num_clients, settings.participation
        )
        num_rounds = settings.num_rounds
        self.max_cohort_examples = 0
        self._assignments: list[_LaneAssignment] = []
        num_full_pass_batches = 0
        counts: list[tuple[int, int, int]] = []
        for r in range(num_rounds):
            counts.append(self._assign_round(r, blocks, lanes))
            work = work_items.of_round(r)
            if isinstance(work, ClientClassWork):
                num_batches = work.count_full_pass_batches(blocks)
                num_full_pass_batches = max(num_full_pass_batches, num_batches)
        participants, pairs_by_round, samples_by_round = np.array(counts).T
        num_lost: np.ndarray | int = 0  # clients that send no update
        seconds = None
        if plans is not None:
            num_lost = np.array([p.num_selected - len(p.clients) for p in plans[:num_rounds]])
            if plans[0].seconds is not None:
                seconds = np.array([p.seconds for p in plans[:num_rounds]], np.float64)
        lane_lengths = np.array([np.diff(a.lane_starts) for a in self._assignments])  # [R, D * V]
        self.shape = ScheduleShape(
            blocks,
            lanes,
            slots=_round_up_max(int(a.counts.max()) for a in self._assignments),
            steps=_round_up_max([int(lane_lengths.max(initial=0))]),
            segments=_round_up_max(
                len(np.unique(block.ends))
                for assignment in self._assignments
                for block in assignment.split_blocks(lanes)
            ),
            full_pass_batches=num_full_pass_batches,
        )
        self.work_counts = WorkCounts(
            participants=participants,
            selected=participants + num_lost,
            pairs=pairs_by_round,
            samples=samples_by_round,
            block_steps=lane_lengths.reshape(num_rounds, blocks, lanes).max(2),
            seconds=seconds,
        )

    def _assign_round(self, round_index: int, blocks: int, lanes: int) -> tuple[int, int, int]:
        """Assign the lanes of the next round, and return its participants, pairs and samples."""
        work, cohort = self._get_work(round_index), self.draw_cohort(round_index)
        assignment = _assign_lanes(work, cohort, blocks, lanes)
        self._assignments.append(assignment)
        sizes = work.partition.sizes[cohort]
        num_participants = int((sizes > 0).sum())
        self.max_cohort_examples = max(self.max_cohort_examples, int(sizes.sum()))
        amounts = (work.num_pairs, work.num_samples)
        pairs, samples = (int(amount[assignment.work_ids].sum()) for amount in amounts)
        return num_participants, pairs, samples

    def draw_cohort(self, round_index: int) -> np.ndarray:
        """Return the ids of the clients of a round, in the order of the draw."""
        if self._plans is not None:
            return self._plans[round_index].clients
        rng = make_host_rng(self.settings.seed, Stream.PARTICIPATION, round_index)
        sizes = self.work_items.of_round(round_index).partition.sizes
        present = np.flatnonzero(find_present(self.partition.sizes, sizes))
        return rng.choice(present, min(self.cohort_size, len(present)), replace=False)

    def _get_work(self, round_index: int) -> ClientWork | ClientClassWork:
        """Return the work of the clients of a round."""
        work = self.work_items.of_round(round_index)
        plan = None if self._plans is None else self._plans[round_index]
        if plan is None or plan.num_steps is None:
            return work
        assert isinstance(work, ClientWork)
        return work.with_num_steps(plan.clients, plan.num_steps)

    def count_passes(self, round_index: int) -> np.ndarray:
        """Return the passes over its examples that each client begins in a round, int64 `[K]`."""
        work = self._get_work(round_index)
        assert isinstance(work, ClientWork), "clients that train"
        return -(-work.num_steps // np.maximum(work.epoch_steps, 1))

    def is_eval_round(self, round_index: int) -> bool:
        """Return whether an evaluation follows a round: every `eval_every`, and the last five."""
        eval_every, num_rounds = self.settings.eval_every, self.settings.num_rounds
        return (round_index + 1) % eval_every == 0 or round_index >= num_rounds - 5

    def trained_work_ids(self, round_indices: Iterable[int]) -> np.ndarray:
        """Return the ids of the clients, or pairs, that train in these rounds, ascending."""
        return np.unique(np.concatenate([self._assignments[r].work_ids for r in round_indices]))

    def client_batches(self, round_index: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's minibatches of a round.

        Args:
          round_index: the round.
          client: the client.

        Returns:
          Indices `[steps, B]` and sizes `[steps]`.
        """
        work, ids = self._get_work(round_index), np.array([client])
        return work.draw_batches(self.settings.seed, round_index, ids)

    def segment_ends(self, round_index: int) -> list[np.ndarray]:
        """Return, for every block, the steps of a round at which a client of a lane ends."""
        blocks = self._assignments[round_index].split_blocks(self.shape.lanes)
        return [np.unique(block.ends) for block in blocks]

    def make_round(
        self,
        round_index: int,
        shape: ScheduleShape | None = None,
        segment_ends: list[np.ndarray] | None = None,
    ) -> RoundSchedule:
        """Return the schedule of one round.

        Args:
          round_index: the round.
          shape: sizes to which the schedule is padded; default: the sizes of the run.
          segment_ends: ends of the segments of every block, for runs in lockstep (default:
            `Scheduler.segment_ends`). They must include `Scheduler.segment_ends`.

        Returns:
          The schedule, arrays on the host.
        """
        schedule = self._make_empty_round(round_index, shape or self.shape)
        work = self._get_work(round_index)
        self._fill_lanes(schedule, round_index, work)
        segment_ends = self.segment_ends(round_index) if segment_ends is None else segment_ends
        schedule.max_steps[...] = max((ends[-1] for ends in segment_ends if len(ends)), default=0)
        blocks = self._assignments[round_index].split_blocks(self.shape.lanes)
        for d, block in enumerate(blocks):
            _fill_segments(schedule, d, block, segment_ends[d])
        if isinstance(work, ClientClassWork) and schedule.full_pass_indices.size:
            work.fill_full_pass(
                schedule.full_pass_indices,
                schedule.full_pass_pair_ids,
                self.draw_cohort(round_index),
            )
        return schedule

    def _make_empty_round(self, round_index: int, shape: ScheduleShape) -> RoundSchedule:
        """Return a round's schedule in which no lane has any work yet."""
        d_, v_, j_, t_, g_, m_ = shape
        num_clients, batch_size = self.partition.num_clients, self.work_items.batch_size
        cohort = np.sort(self.draw_cohort(round_index))
        cohort = cohort[self.work_items.of_round(round_index).partition.sizes[cohort] > 0]
        participants = np.full(self.cohort_size, num_clients, np.int32)
        participants[: len(cohort)] = cohort

        def zeros(*dims: int) -> np.ndarray:
            return np.zeros(dims, np.int32)

        return RoundSchedule(
            round=np.array(round_index, np.int32),
            num_clients=np.array(num_clients, np.int32),
            is_eval_round=np.array(self.is_eval_round(round_index)),
            is_verification=np.array(False),
            weight_fraction=np.zeros((), np.float32),
            max_steps=zeros(),
            client_ids=np.full((d_, v_, j_), len(self.work_items.num_steps), np.int32),
            state_rows=np.full((d_, v_, j_), len(self.work_items.num_steps), np.int32),
            weights=np.zeros((d_, v_, j_), np.float32),
            num_samples=zeros(d_, v_, j_),
            num_steps=zeros(d_, v_, j_),
            staleness=zeros(d_, v_, j_),
            init_example_ids=zeros(d_, v_, j_, self.work_items.num_init_examples),
            batches=zeros(d_, t_, v_, batch_size),
            batch_sizes=zeros(d_, t_, v_),
            num_segments=zeros(d_),
            segment_ends=zeros(d_, g_),
            active_slots=zeros(d_, g_, v_),
            starts_client=np.zeros((d_, g_, v_), bool),
            ends_client=np.zeros((d_, g_, v_), bool),
            participants=participants,
            full_pass_indices=zeros(d_, m_, batch_size),
            full_pass_pair_ids=zeros(d_, m_, batch_size),
        )

    def _fill_lanes(
        self, schedule: RoundSchedule, round_index: int, work_items: ClientWork | ClientClassWork
    ) -> None:
        """Write every lane's clients, one after the other, and their minibatches."""
        work_ids, steps, counts = self._assignments[round_index]
        sizes, num_lanes, seed = work_items.sizes, self.shape.lanes, self.settings.seed
        weights = sizes if self.settings.averaging == "weighted" else np.sign(sizes)
        total = weights[work_ids].sum()
        schedule.weight_fraction[...] = total / max(weights.sum(), 1)
        lanes = np.repeat(np.arange(len(counts)), counts)
        slots = (*np.divmod(lanes, num_lanes), concatenate_aranges(counts))
        schedule.client_ids[slots] = schedule.state_rows[slots] = work_ids
        schedule.weights[slots] = weights[work_ids] / total
        schedule.num_samples[slots], schedule.num_steps[slots] = sizes[work_ids], steps
        if self._plans is not None and (plan := self._plans[round_index]).staleness is not None:
            by_client = dict(zip(plan.clients.tolist(), plan.staleness.tolist(), strict=True))
            schedule.staleness[slots] = [by_client[k] for k in work_ids.tolist()]
        if isinstance(work_items, ClientClassWork) and work_items.num_init_examples:
            init_examples = work_items.draw_init_examples(seed, round_index, work_ids)
            schedule.init_example_ids[slots] = init_examples
        d, v = np.divmod(np.repeat(lanes, steps), num_lanes)
        t = concatenate_aranges(np.bincount(lanes, steps, len(counts)).astype(np.int64))
        batches, batch_sizes = work_items.draw_batches(seed, round_index, work_ids)
        schedule.batches[d, t, v], schedule.batch_sizes[d, t, v] = batches, batch_sizes

    def make_first_step_round(
        self, round_index: int, shape: ScheduleShape | None = None
    ) -> RoundSchedule:
        """Return one round with only the first step of every lane's first client.

        Args:
          round_index: the round.
          shape: sizes to which the schedule is padded; default: the sizes of the run.

        Returns:
          The schedule, arrays on the host.
        """
        schedule = self.make_round(round_index, shape)
        is_busy = schedule.num_steps[:, :, 0] > 0  # [D, V]
        num_steps = np.zeros_like(schedule.num_steps)
        num_steps[:, :, 0] = is_busy
        is_first_segment = (np.arange(schedule.segment_ends.shape[1]) == 0)[:, None]  # [G, 1]
        return schedule._replace(
            is_verification=np.array(True),
            max_steps=np.array(is_busy.any(), np.int32),
            num_steps=num_steps,
            num_segments=np.asarray(is_busy.any(1), np.int32),
            segment_ends=np.ones_like(schedule.segment_ends),
            starts_client=is_first_segment & is_busy[:, None],
            ends_client=is_first_segment & is_busy[:, None],
            active_slots=np.zeros_like(schedule.active_slots),
            is_eval_round=np.array(True),
        )


class AdaptiveScheduler(Scheduler):
    """Makes the schedules of a run whose clients are selected by losses.

    Rounds are planned one after the other. `shape` holds for every cohort of S clients.

    Args:
      work_items: the work of the clients that train.
      settings: settings of the rounds.
      blocks: blocks of lanes.
      lanes: lanes per block.
      start_plans: `start_plans(measure_losses)` returns the plans of the rounds, from the first on.
      shortens_work: whether plans may contain fewer minibatches than `work_items`.

    Attributes:
      num_planned: number of rounds that are planned. `work_counts` is 0 in later rounds.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.core.schedule import AdaptiveScheduler, RoundPlan, RoundSettings
      >>> from fedjax_het.core.work_items import ClientWork
      >>> from fedjax_het.data import partition_from_clients
      >>> def start_plans(measure_losses):
      ...     losses = yield RoundPlan(np.array([0]), 1)
      ...     yield RoundPlan(np.array([int(np.nanargmax(losses))]), 1)
      >>> work = ClientWork(partition_from_clients([[0, 1, 2], [3]]), num_passes=1, batch_size=2)
      >>> settings = RoundSettings(seed=0, num_rounds=2, participation=0.5)
      >>> scheduler = AdaptiveScheduler(work, settings, 1, 1, start_plans, shortens_work=False)
      >>> scheduler.plan_next_round(np.float32([0.1, 0.2]))
      >>> scheduler.draw_cohort(1).tolist(), scheduler.work_counts.samples.tolist()
      ([1], [3, 1])
    """

    def __init__(
        self,
        work_items: ClientWork | ClientClassWork | DriftingWork,
        settings: RoundSettings,
        blocks: int,
        lanes: int,
        start_plans: Callable[[MeasureLosses | None], RoundPlans],
        *,
        shortens_work: bool,
    ):
        self.work_items, self.settings = work_items, settings
        self.partition = work_items.partition
        num_clients = self.partition.num_clients
        self.cohort_size = compute_cohort_size(num_clients, settings.participation)
        works = work_items.works if isinstance(work_items, DriftingWork) else [work_items]
        self.shape = _bound_shape(
            [work.num_steps for work in works],
            self.cohort_size,
            blocks,
            lanes,
            shortens_work=shortens_work,
        )
        self._start_plans = start_plans
        self.max_cohort_examples = int(np.sort(self.partition.sizes)[-self.cohort_size :].sum())
        self.restart()

    def restart(self, measure_losses: MeasureLosses | None = None) -> None:
        """Plan the first round, and drop all other plans.

        Args:
          measure_losses: measures the losses of candidates (default: no candidate reports, so that
            the plan serves for sizes only).
        """
        num_rounds, plans = self.settings.num_rounds, self._start_plans(measure_losses)
        self._next_plans, self._plans, self._assignments = plans, [], []
        self.work_counts = WorkCounts(
            participants=np.zeros(num_rounds, np.int64),
            selected=np.zeros(num_rounds, np.int64),
            pairs=np.zeros(num_rounds, np.int64),
            samples=np.zeros(num_rounds, np.int64),
            block_steps=np.zeros((num_rounds, self.shape.blocks), np.int64),
        )
        self._add_plan(next(self._next_plans))

    @property
    def num_planned(self) -> int:
        """Number of rounds that are planned."""
        return len(self._assignments)

    def plan_next_round(self, losses: np.ndarray) -> None:
        """Plan the next round.

        Args:
          losses: training loss of each client in the last planned round, float32 `[K]`; NaN for
            clients that did not train.
        """
        self._add_plan(self._next_plans.send(losses))

    def _add_plan(self, plan: RoundPlan) -> None:
        r, shape, counts = self.num_planned, self.shape, self.work_counts
        assert isinstance(self._plans, list)
        self._plans.append(plan)
        num_participants, pairs, samples = self._assign_round(r, shape.blocks, shape.lanes)
        num_lost = plan.num_selected - len(plan.clients)
        counts.participants[r], counts.selected[r] = num_participants, num_participants + num_lost
        counts.pairs[r], counts.samples[r] = pairs, samples
        lane_lengths = np.diff(self._assignments[r].lane_starts)
        counts.block_steps[r] = lane_lengths.reshape(shape.blocks, shape.lanes).max(1)
        if plan.seconds is not None:
            seconds = np.zeros(len(counts.samples)) if counts.seconds is None else counts.seconds
            seconds[r] = plan.seconds
            self.work_counts = counts._replace(seconds=seconds)

    def trained_work_ids(self, round_indices: Iterable[int]) -> np.ndarray:
        """Return the ids of the clients that train, or may train, in these rounds, ascending."""
        round_indices = list(round_indices)
        if max(round_indices) >= self.num_planned:
            return np.flatnonzero(self.partition.sizes > 0)
        return super().trained_work_ids(round_indices)


def _bound_shape(
    phase_steps: Sequence[np.ndarray],
    cohort_size: int,
    blocks: int,
    lanes: int,
    *,
    shortens_work: bool,
) -> ScheduleShape:
    """Return sizes that hold for every cohort of clients on lanes that `_assign_lanes` assigns.

    Args:
      phase_steps: minibatches of each client in each phase of a run, int64 `[K]` each.
      cohort_size: number of clients of a cohort, S.
      blocks: blocks of lanes.
      lanes: lanes per block.
      shortens_work: whether clients may have fewer minibatches, at least 1.

    Returns:
      The sizes.
    """
    num_lanes, max_steps, max_slots = blocks * lanes, 1, 1
    for num_steps in phase_steps:
        ascending = np.sort(num_steps[num_steps > 0])
        longest = ascending[-cohort_size:]
        count, total = len(longest), int(longest.sum())
        # Graham (1969, SIAM J. Appl. Math. 17, 416-429): the bound of list scheduling.
        bound = (total + (num_lanes - 1) * int(longest.max(initial=0))) // num_lanes
        # A client joins a lane of the fewest steps: all lanes then have at least as many steps as
        # the clients before it on its lane. The first clients go to empty lanes.
        shortest = np.ones(count, np.int64) if shortens_work else ascending[:count]
        num_before = int((num_lanes * shortest.cumsum() < total).sum())
        max_slots = max(max_slots, min(1 + num_before, count - num_lanes + 1))
        max_steps = max(max_steps, bound)
    segments = min(cohort_size, max_steps, lanes * max_slots)
    sizes = (_round_up_max([size]) for size in (max_slots, max_steps, segments))
    return ScheduleShape(blocks, lanes, *sizes)


def _assign_lanes(
    work: ClientWork | ClientClassWork, clients: np.ndarray, blocks: int, lanes: int
) -> _LaneAssignment:
    """Assign the longest client first to the shortest lane; ties by client id, over blocks."""
    work_ids, num_steps = work.work_ids_of_clients(clients), work.num_steps
    work_ids = work_ids[num_steps[work_ids] > 0]
    work_ids = work_ids[np.lexsort((work_ids, -num_steps[work_ids]))]
    heap = [(0, v, d) for v in range(lanes) for d in range(blocks)]
    lane_ids = np.zeros(len(work_ids), np.int64)
    for i, steps in enumerate(num_steps[work_ids].tolist()):
        length, v, d = heap[0]
        lane_ids[i] = d * lanes + v
        heapq.heapreplace(heap, (length + steps, v, d))
    work_ids = work_ids[np.argsort(lane_ids, kind="stable")].astype(np.int32)
    counts = np.bincount(lane_ids, minlength=blocks * lanes)
    return _LaneAssignment(work_ids, num_steps[work_ids], counts)


def _fill_segments(
    schedule: RoundSchedule, d: int, block: _LaneAssignment, segment_ends: np.ndarray
) -> None:
    """Write the segments of block d."""
    num_segments = len(segment_ends)
    schedule.num_segments[d] = num_segments
    if not num_segments:
        return
    schedule.segment_ends[d, :num_segments] = segment_ends
    segment_begins = np.concatenate([[0], segment_ends[:-1]])
    # One search for all lanes, each of which is shifted behind the one before.
    busy_lanes = np.flatnonzero(block.counts)
    counts, ends = block.counts[busy_lanes], block.ends
    first_items = counts.cumsum() - counts
    shifts = np.arange(len(busy_lanes)) * (segment_ends[-1] + 1)
    shifted_begins = segment_begins[:, None] + shifts
    items = np.searchsorted(ends + np.repeat(shifts, counts), shifted_begins, side="right")
    items = np.minimum(items, first_items + counts - 1)  # [G, busy lanes]; the last of an idle lane
    starts = segment_begins[:, None] == (ends - block.num_steps)[items]
    schedule.active_slots[d, :num_segments, busy_lanes] = (items - first_items).T
    schedule.starts_client[d, :num_segments, busy_lanes] = starts.T
    schedule.ends_client[d, :num_segments, busy_lanes] = (segment_ends[:, None] == ends[items]).T


def merge_shapes(schedulers: Sequence[Scheduler], num_parallel: int = 1) -> ScheduleShape:
    """Return sizes that hold for every round of several runs.

    Args:
      schedulers: the schedulers of the runs.
      num_parallel: number of runs in lockstep. Any of the runs can be in lockstep, depending on
        runs that end early and on the progress of other workers.

    Returns:
      The sizes.
    """
    merged = ScheduleShape(*map(max, zip(*(s.shape for s in schedulers), strict=True)))
    if num_parallel == 1:
        return merged
    if any(isinstance(s, AdaptiveScheduler) for s in schedulers):
        segments = _round_up_max([min(merged.steps, num_parallel * merged.segments)])
        return merged._replace(segments=segments)
    rounds = range(schedulers[0].settings.num_rounds)
    segment_counts = (len(ends) for r in rounds for ends in merge_segment_ends(schedulers, r))
    return merged._replace(segments=_round_up_max(segment_counts))


def merge_segment_ends(schedulers: Sequence[Scheduler], round_index: int) -> list[np.ndarray]:
    """Return the segments of runs in lockstep.

    Args:
      schedulers: the schedulers of the runs.
      round_index: the round.

    Returns:
      For every block, the steps at which a client of any of the runs ends.
    """
    ends_by_block = zip(*(s.segment_ends(round_index) for s in schedulers), strict=True)
    return [np.unique(np.concatenate(ends)) for ends in ends_by_block]


def compute_useful_fraction(schedulers: Sequence[Scheduler], *, is_concurrent: bool) -> float:
    """Compute the fraction of processed samples that are real rather than padding.

    Args:
      schedulers: schedulers of runs in lockstep; each waits for the longest.
      is_concurrent: whether a run's blocks wait for each other; else one follows the other.

    Returns:
      The fraction, at most 1.
    """
    block_steps = np.max([s.work_counts.block_steps for s in schedulers], axis=0)  # [R, D]
    num_steps = block_steps.sum()
    if is_concurrent:
        num_steps = block_steps.max(1).sum() * block_steps.shape[1]
    first = schedulers[0]
    num_processed = num_steps * first.shape.lanes * first.work_items.batch_size * len(schedulers)
    num_samples = sum(s.work_counts.samples.sum() for s in schedulers)
    return float(num_samples / num_processed) if num_processed else 1.0


def stack_rounds(rounds: Sequence[RoundSchedule], num_rounds: int) -> RoundSchedule:
    """Stack the schedules of a chunk of rounds.

    Args:
      rounds: schedules of equal sizes.
      num_rounds: number of rows; copies of the last schedule are padding.

    Returns:
      The schedules, `[num_rounds, ...]`.
    """
    rounds = [*rounds, *[rounds[-1]] * (num_rounds - len(rounds))]
    return RoundSchedule(*map(np.stack, zip(*rounds, strict=True)))


def with_state_rows(schedule: RoundSchedule, ids: np.ndarray, num_rows: int) -> RoundSchedule:
    """Return a schedule for a table of client states.

    Args:
      schedule: schedule of a chunk of rounds.
      ids: clients of the first rows of the table, ascending.
      num_rows: rows of the table.

    Returns:
      The schedule with rows of the table in `state_rows`.
    """
    is_used = schedule.client_ids < schedule.num_clients.reshape(-1, 1, 1, 1)
    rows = np.where(is_used, np.searchsorted(ids, schedule.client_ids), num_rows)
    return schedule._replace(state_rows=rows.astype(np.int32))


def with_example_rows(
    schedules: Sequence[RoundSchedule], num_rows: int
) -> tuple[list[RoundSchedule], np.ndarray]:
    """Return schedules for a table of the examples that they read.

    Args:
      schedules: schedules of chunks of rounds.
      num_rows: rows of the table.

    Returns:
      The schedules with rows of the table in place of positions in the training set, and the
      position of each row, ascending `[n]`.

    Raises:
      ValueError: if the schedules read more examples than the table has rows.

    Example:
      >>> from fedjax_het.core.schedule import RoundSettings, Scheduler, with_example_rows
      >>> from fedjax_het.core.work_items import ClientWork
      >>> from fedjax_het.data import partition_from_clients
      >>> work = ClientWork(partition_from_clients([[5, 9]]), num_passes=1, batch_size=1)
      >>> schedule = Scheduler(work, RoundSettings(seed=0), blocks=1, lanes=1).make_round(0)
      >>> (paged,), positions = with_example_rows([schedule], num_rows=2)
      >>> positions.tolist(), sorted(paged.batches.ravel().tolist())
      ([5, 9], [0, 1])
    """
    names = ("batches", "init_example_ids", "full_pass_indices")
    fields = [getattr(schedule, name) for schedule in schedules for name in names]
    flat = np.concatenate([field.ravel() for field in fields])
    positions, rows = np.unique(flat, return_inverse=True)
    if len(positions) > num_rows:
        message = f"{len(positions)} examples in a table of {num_rows}"
        raise ValueError(message)
    parts = np.split(rows.astype(np.int32), np.cumsum([field.size for field in fields])[:-1])
    paged = iter([part.reshape(field.shape) for part, field in zip(parts, fields, strict=True)])
    return [
        schedule._replace(**{n: next(paged) for n in names}) for schedule in schedules
    ], positions


def round_up_size(size: int) -> int:
    """Round a size up to 1, 2, 3, 4, 6, 8, 12, ..., so that runs share a compilation."""
    return _round_up_max([size])


def _round_up_max(sizes: Iterable[int]) -> int:
    """Round the largest size up to 1, 2, 3, 4, 6, 8, 12, ...

    Runs on other partitions then share a compilation. The device runs only the real steps, so
    padding costs memory only.
    """
    size = max([1, *sizes])
    power = 1 << (size.bit_length() - 1)
    return next(s for s in (power, power * 3 // 2, power * 2) if s >= size)
