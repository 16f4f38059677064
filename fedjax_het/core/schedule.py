"""The host's half of a round: who takes part, in which order their samples come, on which lane.

Everything is drawn with NumPy from (seed, round, client id), so every method of a comparison
sees the same clients and the same minibatches. Clients are sequences of minibatch steps; they
are packed on lanes of nearly equal length instead of being padded to the longest. Where clients
condense data, the lanes run through pairs of a client and a class instead, see `core.work_items`; what
is said of clients below holds for them.

Axes: D blocks of lanes (one per device, as a rule), V lanes per block, J client slots per lane, T
steps per lane, B batch, G segments, S sampled clients. A segment is a stretch of steps of one block
in which no client starts or ends; with one lane per block every client is one segment.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_het.core.condensation_work import ClientClassWork
from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.core.work_items import ClientWork, concatenate_aranges
from fedjax_het.data import Partition


class RoundSchedule(NamedTuple):
    """One round's work, padded to the run's largest round (or `[R, ...]` for a chunk)."""

    round: np.ndarray  # [] int32, from 0
    num_clients: np.ndarray  # [] int32: K
    is_eval_round: np.ndarray  # [] bool
    is_verification: (
        np.ndarray
    )  # [] bool: the first step of everything, to check a program's numbers
    weight_fraction: (
        np.ndarray
    )  # [] float32: the part of all clients' weight that the round's clients have
    max_steps: np.ndarray  # [] int32: steps of the longest lane of all blocks and runs in step
    client_ids: np.ndarray  # [D, V, J] int32; num_clients where the slot is unused
    state_rows: (
        np.ndarray
    )  # [D, V, J] int32: where their state is; the ids where all states are there
    weights: np.ndarray  # [D, V, J] float32, sum to 1 over the round's clients
    num_samples: np.ndarray  # [D, V, J] int32
    num_steps: np.ndarray  # [D, V, J] int32
    init_example_ids: (
        np.ndarray
    )  # [D, V, J, I] int32: examples that a client starts from, if it does
    batches: np.ndarray  # [D, T, V, B] int32 indices of training examples
    batch_sizes: np.ndarray  # [D, T, V] int32; entries beyond the size are padding
    num_segments: np.ndarray  # [D] int32
    segment_ends: np.ndarray  # [D, G] int32: step at which the segment stops
    active_slots: np.ndarray  # [D, G, V] int32: which of the lane's clients
    starts_client: np.ndarray  # [D, G, V] bool: a client's first step opens this segment
    ends_client: np.ndarray  # [D, G, V] bool: a client's last step closes it
    participants: np.ndarray  # [S] int32: the clients that take part, ascending; the rest is K
    full_pass_indices: (
        np.ndarray
    )  # [D, M, B] int32: all examples of the round's clients, where a method asks
    full_pass_pair_ids: np.ndarray  # [D, M, B] int32: client * C + class of each; K * C for padding


class ScheduleShape(NamedTuple):
    """Static sizes that hold for every round of a run, or of several runs."""

    blocks: int
    lanes: int  # per block
    slots: int
    steps: int
    segments: int
    full_pass_batches: int = 0  # batches

    def num_bytes(self, batch_size: int) -> int:
        """What the minibatches of one round take."""
        return self.blocks * self.lanes * self.steps * batch_size * 4


class WorkCounts(NamedTuple):
    """What the rounds of a run amount to, per round: `[R]` each."""

    participants: np.ndarray  # sampled clients that hold data
    pairs: np.ndarray  # pairs of a client and a class that they condense
    samples: np.ndarray  # client samples processed
    block_steps: np.ndarray  # [R, D] steps of each block's longest lane


class Scheduler:
    """Makes the schedule of any round of a run, in any order.

    Args:
      partition: which training examples each client holds.
      units: what the lanes run through, and in which minibatches.
      participation: share of the clients sampled each round, uniformly without replacement;
        max(1, int(num_clients * participation)) of them. A sampled client without data has
        nothing to train and is left out of the average.
      averaging: "uniform" or "weighted" (by samples); None where nothing is averaged.
    """

    def __init__(
        self,
        partition: Partition,
        work_items: ClientWork | ClientClassWork,
        *,
        seed: int,
        num_rounds: int,
        participation: float,
        averaging: str | None,
        eval_every: int,
        blocks: int,
        lanes: int,
    ):
        self.partition, self.work_items, self.seed, self.num_rounds = (
            partition,
            work_items,
            seed,
            num_rounds,
        )
        self.batch_size, self.averaging = work_items.batch_size, averaging
        self.eval_every = eval_every
        self.cohort_size = compute_cohort_size(partition.num_clients, participation)
        self._steps_per_item = self.work_items.num_steps  # [K], or of every pair
        cohorts = [self.draw_cohort(r) for r in range(num_rounds)]
        assignments = [self._pack(clients, blocks * lanes, lanes) for clients in cohorts]
        self._assignments = assignments
        lane_lengths = np.array(
            [self._lane_lengths(round_) for round_ in assignments]
        )  # [R, D * V]
        self.shape = ScheduleShape(
            blocks,
            lanes,
            slots=_max_rounded_up(int(round_.counts.max()) for round_ in assignments),
            steps=_max_rounded_up([int(lane_lengths.max(initial=0))]),
            segments=0,
        )
        segment_counts = (len(cut) for r in range(num_rounds) for cut in self.segment_ends(r))
        self.shape = self.shape._replace(segments=_max_rounded_up(segment_counts))
        if isinstance(self.work_items, ClientClassWork) and self.work_items.needs_full_pass:
            self.shape = self.shape._replace(
                full_pass_batches=self.work_items.count_full_pass_batches(blocks)
            )
        self.work_counts = WorkCounts(
            participants=np.array([int((partition.sizes[each] > 0).sum()) for each in cohorts]),
            pairs=self._sum_per_round(self.work_items.num_pairs),
            samples=self._sum_per_round(self.work_items.num_samples),
            block_steps=lane_lengths.reshape(num_rounds, blocks, lanes).max(2),
        )

    def draw_cohort(self, round_index: int) -> np.ndarray:
        """Ids of the clients sampled in a round, in the order they were drawn."""
        rng = make_host_rng(self.seed, Stream.PARTICIPATION, round_index)
        return rng.choice(self.partition.num_clients, self.cohort_size, replace=False)

    def is_eval_round(self, round_index: int) -> bool:
        """Whether an evaluation is due after a round: every so many, and after the last five."""
        return (round_index + 1) % self.eval_every == 0 or round_index >= self.num_rounds - 5

    def trained_work_ids(self, round_indices: Iterable[int]) -> np.ndarray:
        """Ids of the clients, or pairs, that the lanes run through in these rounds, ascending."""
        return np.unique(np.concatenate([self._assignments[r].work_ids for r in round_indices]))

    def client_batches(self, round_index: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's minibatches of a round: indices `[steps, B]` and sizes `[steps]`."""
        return self.work_items.draw_batches(self.seed, round_index, np.array([client]))

    def segment_ends(self, round_index: int) -> list[np.ndarray]:
        """For every block, the steps of a round at which a client of one of its lanes ends."""
        assignment = self._assignments[round_index]
        ends = self._work_item_ends(assignment)
        return [np.unique(ends[block]) for block in assignment.blocks(self.shape.lanes)]

    def make_round(
        self,
        round_index: int,
        shape: ScheduleShape | None = None,
        segment_ends: list[np.ndarray] | None = None,
    ) -> RoundSchedule:
        """The schedule of one round, padded to `shape` (default: the run's own).

        `cuts` are where segments end in every block, if there are to be more than `self.cuts`.
        """
        schedule = self._empty_round(round_index, shape or self.shape)
        self._fill_lanes(schedule, round_index)
        segment_ends = self.segment_ends(round_index) if segment_ends is None else segment_ends
        schedule.max_steps[...] = max((cut[-1] for cut in segment_ends if len(cut)), default=0)
        assignment = self._assignments[round_index]
        ends, steps = self._work_item_ends(assignment), self._steps_per_item[assignment.work_ids]
        counts = assignment.counts.reshape(self.shape.blocks, -1)
        for d, block in enumerate(assignment.blocks(self.shape.lanes)):
            _fill_segments(schedule, d, counts[d], ends[block], steps[block], segment_ends[d])
        if isinstance(self.work_items, ClientClassWork) and schedule.full_pass_indices.size:
            sampled = self.draw_cohort(round_index)
            self.work_items.fill_full_pass(
                schedule.full_pass_indices, schedule.full_pass_pair_ids, sampled
            )
        return schedule

    def _empty_round(self, round_index: int, shape: ScheduleShape) -> RoundSchedule:
        """A round's schedule in which no lane has anything to do yet."""
        d_, v_, j_, t_, g_, m_ = shape
        work_items, unused_id = self.work_items, len(self._steps_per_item)
        participants = np.full(self.cohort_size, self.partition.num_clients, np.int32)
        cohort = self.draw_cohort(round_index)
        training_clients = np.sort(cohort[self.partition.sizes[cohort] > 0])
        participants[: len(training_clients)] = training_clients
        return RoundSchedule(
            round=np.array(round_index, np.int32),
            num_clients=np.array(self.partition.num_clients, np.int32),
            is_eval_round=np.array(self.is_eval_round(round_index)),
            is_verification=np.array(False),
            weight_fraction=np.zeros((), np.float32),
            max_steps=np.zeros((), np.int32),
            client_ids=np.full((d_, v_, j_), unused_id, np.int32),
            state_rows=np.full((d_, v_, j_), unused_id, np.int32),
            weights=np.zeros((d_, v_, j_), np.float32),
            num_samples=np.zeros((d_, v_, j_), np.int32),
            num_steps=np.zeros((d_, v_, j_), np.int32),
            init_example_ids=np.zeros((d_, v_, j_, work_items.num_init_examples), np.int32),
            batches=np.zeros((d_, t_, v_, self.batch_size), np.int32),
            batch_sizes=np.zeros((d_, t_, v_), np.int32),
            num_segments=np.zeros(d_, np.int32),
            segment_ends=np.zeros((d_, g_), np.int32),
            active_slots=np.zeros((d_, g_, v_), np.int32),
            starts_client=np.zeros((d_, g_, v_), bool),
            ends_client=np.zeros((d_, g_, v_), bool),
            participants=participants,
            full_pass_indices=np.zeros((d_, m_, self.batch_size), np.int32),
            full_pass_pair_ids=np.zeros((d_, m_, self.batch_size), np.int32),
        )

    def _fill_lanes(self, schedule: RoundSchedule, round_index: int) -> None:
        """Every lane's clients, one after the other, and their minibatches."""
        assignment, sizes = self._assignments[round_index], self.work_items.sizes
        work_ids, steps = assignment.work_ids, self._steps_per_item[assignment.work_ids]
        weights = sizes if self.averaging == "weighted" else np.sign(sizes)
        total = weights[work_ids].sum()
        schedule.weight_fraction[...] = total / max(weights.sum(), 1)
        lanes = np.repeat(np.arange(len(assignment.counts)), assignment.counts)
        slot_index = (*np.divmod(lanes, self.shape.lanes), concatenate_aranges(assignment.counts))
        schedule.client_ids[slot_index] = schedule.state_rows[slot_index] = work_ids
        schedule.weights[slot_index] = weights[work_ids] / total
        schedule.num_samples[slot_index], schedule.num_steps[slot_index] = sizes[work_ids], steps
        if self.work_items.num_init_examples:
            schedule.init_example_ids[slot_index] = self.work_items.draw_init_examples(
                self.seed, round_index, work_ids
            )
        d, v = np.divmod(np.repeat(lanes, steps), self.shape.lanes)
        t = concatenate_aranges(np.bincount(lanes, steps, len(assignment.counts)).astype(np.int64))
        batches, batch_sizes = self.work_items.draw_batches(self.seed, round_index, work_ids)
        schedule.batches[d, t, v], schedule.batch_sizes[d, t, v] = batches, batch_sizes

    def make_first_step_round(
        self, round_index: int, shape: ScheduleShape | None = None
    ) -> RoundSchedule:
        """One round cut to the first step of every lane's first client."""
        schedule = self.make_round(round_index, shape)
        is_busy = schedule.num_steps[:, :, 0] > 0  # [D, V]
        num_steps = np.zeros_like(schedule.num_steps)
        num_steps[:, :, 0] = is_busy
        is_first_segment = (np.arange(schedule.segment_ends.shape[1]) == 0)[
            :, None
        ]  # [G, 1]: the only segment
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

    def _work_item_ends(self, assignment: "_LaneAssignment") -> np.ndarray:
        """The step of its lane at which each unit ends."""
        ends = self._steps_per_item[assignment.work_ids].cumsum()
        return ends - np.repeat(
            np.concatenate([[0], ends])[assignment.offsets[:-1]], assignment.counts
        )

    def _lane_lengths(self, assignment: "_LaneAssignment") -> np.ndarray:
        """Steps of each lane."""
        return np.diff(
            np.concatenate([[0], self._steps_per_item[assignment.work_ids].cumsum()])[
                assignment.offsets
            ]
        )

    def _sum_per_round(self, counts: np.ndarray) -> np.ndarray:
        """`[R]` sums over the units of every round."""
        return np.array([counts[packed.work_ids].sum() for packed in self._assignments])

    def _pack(self, clients: np.ndarray, num_lanes: int, lanes_per_block: int) -> "_LaneAssignment":
        """Longest client first onto the shortest lane; ties by client id, and over the blocks."""
        work_ids = self.work_items.work_ids_of_clients(clients)
        work_ids = work_ids[self._steps_per_item[work_ids] > 0]
        work_ids = work_ids[np.lexsort((work_ids, -self._steps_per_item[work_ids]))]
        num_blocks = num_lanes // lanes_per_block
        heap = [(0, v, d) for v in range(lanes_per_block) for d in range(num_blocks)]
        assigned_lanes = []
        for steps in self._steps_per_item[work_ids].tolist():
            length, v, d = heap[0]
            assigned_lanes.append(d * lanes_per_block + v)
            heapq.heapreplace(heap, (length + steps, v, d))
        lane_ids = np.array(assigned_lanes, np.int64)
        lane_order = np.argsort(lane_ids, kind="stable")
        return _LaneAssignment(
            work_ids[lane_order].astype(np.int32), np.bincount(lane_ids, minlength=num_lanes)
        )


class _LaneAssignment(NamedTuple):
    """Which units a round's lanes run through."""

    work_ids: np.ndarray  # [N] one lane's after the other's, block after block
    counts: np.ndarray  # [D * V] of each lane

    @property
    def offsets(self) -> np.ndarray:
        """[D * V + 1] where each lane begins among the units."""
        return np.concatenate([[0], self.counts.cumsum()])

    def blocks(self, lanes_per_block: int) -> list[slice]:
        """Each block's units, of so many lanes."""
        return [
            slice(*pair) for pair in itertools.pairwise(self.offsets[::lanes_per_block].tolist())
        ]


def merge_shapes(schedulers: Sequence[Scheduler], num_parallel: int = 1) -> ScheduleShape:
    """A shape that holds for every round of several runs, any `width` of them in step: which ones
    these are may depend on what ends early, and on what other workers have taken."""
    shapes = [s.shape for s in schedulers]
    merged = ScheduleShape(*map(max, zip(*shapes, strict=True)))
    if num_parallel == 1:
        return merged
    rounds = range(schedulers[0].num_rounds)
    segment_counts = (len(cut) for r in rounds for cut in merge_segment_ends(schedulers, r))
    return merged._replace(segments=_max_rounded_up(segment_counts))


def compute_useful_fraction(schedulers: Sequence[Scheduler], *, is_concurrent: bool) -> float:
    """Client samples per sample slot that the lanes run through, idle lanes included.

    Args:
      schedulers: of runs that go in step: each waits for the longest.
      together: whether a run's blocks wait for each other; else one follows the other.
    """
    max_block_steps = np.max([s.work_counts.block_steps for s in schedulers], axis=0)  # [R, D]
    steps = (
        max_block_steps.max(1) * max_block_steps.shape[1]
        if is_concurrent
        else max_block_steps.sum(1)
    )
    first = schedulers[0]
    num_processed = steps.sum() * first.shape.lanes * first.batch_size * len(schedulers)
    num_samples = sum(s.work_counts.samples.sum() for s in schedulers)
    return float(num_samples / num_processed) if num_processed else 1.0


def merge_segment_ends(schedulers: Sequence[Scheduler], round_index: int) -> list[np.ndarray]:
    """For every block, the steps at which a client of any of these runs ends."""
    ends_by_block = zip(*(s.segment_ends(round_index) for s in schedulers), strict=True)
    return [np.unique(np.concatenate(cuts)) for cuts in ends_by_block]


def stack_rounds(rounds: Sequence[RoundSchedule], num_rounds: int) -> RoundSchedule:
    """Rounds as `[capacity, ...]`; the rest is padding, copies of the last."""
    rounds = [*rounds, *[rounds[-1]] * (num_rounds - len(rounds))]
    return RoundSchedule(*map(np.stack, zip(*rounds, strict=True)))


def compute_cohort_size(num_clients: int, participation: float) -> int:
    """Clients sampled each round: the share rounded down, but never none."""
    return max(1, int(num_clients * participation + 1e-9))


def with_state_rows(schedule: RoundSchedule, ids: np.ndarray, num_rows: int) -> RoundSchedule:
    """The schedule for states of which row i is that of client `ids[i]` (ascending)."""
    is_used = schedule.client_ids < schedule.num_clients.reshape(-1, 1, 1, 1)
    rows = np.where(is_used, np.searchsorted(ids, schedule.client_ids), num_rows)
    return schedule._replace(state_rows=rows.astype(np.int32))


def _round_up_size(size: int) -> int:
    """To 1, 2, 3, 4, 6, 8, 12, ...: runs on other partitions then share a compilation.

    It costs memory only, since the device runs as many steps as there are.
    """
    power = 1 << (size.bit_length() - 1)
    return next(s for s in (power, power * 3 // 2, power * 2) if s >= size)


def _max_rounded_up(sizes: Iterable[int]) -> int:
    return _round_up_size(max([1, *sizes]))


def _fill_segments(
    schedule: RoundSchedule,
    d: int,
    counts: np.ndarray,
    work_item_ends: np.ndarray,
    work_item_steps: np.ndarray,
    segment_ends: np.ndarray,
) -> None:
    """Write block d's segments: its lanes have so many units, which end at these steps of theirs
    and take so many."""
    num_segments = len(segment_ends)
    schedule.num_segments[d] = num_segments
    if not num_segments:
        return
    schedule.segment_ends[d, :num_segments] = segment_ends
    segment_begins = np.concatenate([[0], segment_ends[:-1]])
    # One search for all lanes, each of which is moved behind the one before.
    busy_lanes = np.flatnonzero(counts)
    counts = counts[busy_lanes]
    first_items, lanes = (
        counts.cumsum() - counts,
        np.arange(len(busy_lanes)) * (segment_ends[-1] + 1),
    )
    query = segment_begins[:, None] + lanes
    position = np.searchsorted(work_item_ends + np.repeat(lanes, counts), query, side="right")
    work_item = np.minimum(
        position, first_items + counts - 1
    )  # [G, busy lanes]; an idle lane's is its last
    schedule.active_slots[d, :num_segments, busy_lanes] = (work_item - first_items).T
    schedule.starts_client[d, :num_segments, busy_lanes] = (
        segment_begins[:, None] == (work_item_ends - work_item_steps)[work_item]
    ).T
    schedule.ends_client[d, :num_segments, busy_lanes] = (
        segment_ends[:, None] == work_item_ends[work_item]
    ).T
