"""The host's half of a round: who takes part, in which order their samples come, on which lane.

Everything is drawn with NumPy from (seed, round, client id), so every method of a comparison
sees the same clients and the same minibatches. Clients are sequences of minibatch steps; they
are packed on lanes of nearly equal length instead of being padded to the longest. Where clients
condense data, the lanes run through pairs of a client and a class instead, see `units.py`; what
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

from fedjax_het.data import Partition
from fedjax_het.engine.randomness import Stream, host_rng
from fedjax_het.engine.units import ClientUnits, PairUnits


class RoundSchedule(NamedTuple):
    """One round's work, padded to the run's largest round (or `[R, ...]` for a chunk)."""

    round: np.ndarray  # [] int32, from 0
    num_clients: np.ndarray  # [] int32: K
    evaluate: np.ndarray  # [] bool
    trial: np.ndarray  # [] bool: the first step of everything, to check a program's numbers
    share: np.ndarray  # [] float32: the part of all clients' weight that the round's clients have
    longest: np.ndarray  # [] int32: steps of the longest lane of all blocks and runs in step
    client_ids: np.ndarray  # [D, V, J] int32; num_clients where the slot is unused
    rows: np.ndarray  # [D, V, J] int32: where their state is; the ids where all states are there
    weights: np.ndarray  # [D, V, J] float32, sum to 1 over the round's clients
    num_samples: np.ndarray  # [D, V, J] int32
    num_steps: np.ndarray  # [D, V, J] int32
    seeds: np.ndarray  # [D, V, J, I] int32: examples that a client starts from, if it does
    batches: np.ndarray  # [D, T, V, B] int32 indices of training examples
    batch_sizes: np.ndarray  # [D, T, V] int32; entries beyond the size are padding
    num_segments: np.ndarray  # [D] int32
    segment_ends: np.ndarray  # [D, G] int32: step at which the segment stops
    slots: np.ndarray  # [D, G, V] int32: which of the lane's clients
    starts: np.ndarray  # [D, G, V] bool: a client's first step opens this segment
    ends: np.ndarray  # [D, G, V] bool: a client's last step closes it
    participants: np.ndarray  # [S] int32: the clients that take part, ascending; the rest is K
    census: np.ndarray  # [D, M, B] int32: all examples of the round's clients, where a method asks
    census_pairs: np.ndarray  # [D, M, B] int32: client * C + class of each; K * C for padding


class Shape(NamedTuple):
    """Static sizes that hold for every round of a run, or of several runs."""

    blocks: int
    lanes: int  # per block
    slots: int
    steps: int
    segments: int
    census: int = 0  # batches

    def num_bytes(self, batch_size: int) -> int:
        """What the minibatches of one round take."""
        return self.blocks * self.lanes * self.steps * batch_size * 4


class Work(NamedTuple):
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
        units: ClientUnits | PairUnits,
        *,
        seed: int,
        rounds: int,
        participation: float,
        averaging: str | None,
        eval_every: int,
        blocks: int,
        lanes: int,
    ):
        self.partition, self.units, self.seed, self.rounds = partition, units, seed, rounds
        self.batch_size, self.averaging = units.batch_size, averaging
        self.eval_every = eval_every
        self.cohort_size = cohort_size(partition.num_clients, participation)
        self._steps = self.units.steps  # [K], or of every pair
        packed = [self._pack(r, blocks, lanes) for r in range(rounds)]
        self._packed = packed
        self.shape = Shape(
            blocks,
            lanes,
            slots=_most(len(lane) for lanes_ in packed for lane in lanes_),
            steps=_most(self._length(lane) for lanes_ in packed for lane in lanes_),
            segments=0,
        )
        cuts = (len(cut) for r in range(rounds) for cut in self.cuts(r))
        self.shape = self.shape._replace(segments=_most(cuts))
        if isinstance(self.units, PairUnits) and self.units.takes_census:
            self.shape = self.shape._replace(census=self.units.census_batches(blocks))
        starts, sizes = range(0, blocks * lanes, lanes), partition.sizes
        self.work = Work(
            participants=np.array(
                [int((sizes[self.participants(r)] > 0).sum()) for r in range(rounds)]
            ),
            pairs=self._totals(self.units.pairs),
            samples=self._totals(self.units.samples),
            block_steps=np.array(
                [
                    [max(map(self._length, lanes_[d : d + lanes])) for d in starts]
                    for lanes_ in packed
                ]
            ),
        )

    def participants(self, round_index: int) -> np.ndarray:
        """Ids of the clients sampled in a round, in the order they were drawn."""
        rng = host_rng(self.seed, Stream.PARTICIPATION, round_index)
        return rng.choice(self.partition.num_clients, self.cohort_size, replace=False)

    def trained(self, rounds: Iterable[int]) -> np.ndarray:
        """Ids of the clients, or pairs, that the lanes run through in these rounds, ascending."""
        lanes = (lane for r in rounds for lane in self._packed[r])
        return np.unique(np.fromiter(itertools.chain.from_iterable(lanes), np.int64))

    def client_batches(self, round_index: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's minibatches of a round: indices `[steps, B]` and sizes `[steps]`."""
        return self.units.batches(self.seed, round_index, client)

    def cuts(self, round_index: int) -> list[np.ndarray]:
        """For every block, the steps of a round at which a client of one of its lanes ends."""
        return [_cuts(self._block_steps(round_index, d)) for d in range(self.shape.blocks)]

    def round(
        self,
        round_index: int,
        shape: Shape | None = None,
        cuts: list[np.ndarray] | None = None,
    ) -> RoundSchedule:
        """The schedule of one round, padded to `shape` (default: the run's own).

        `cuts` are where segments end in every block, if there are to be more than `self.cuts`.
        """
        out = self._empty_round(round_index, shape or self.shape)
        self._fill_lanes(out, round_index)
        cuts = self.cuts(round_index) if cuts is None else cuts
        out.longest[...] = max((cut[-1] for cut in cuts if len(cut)), default=0)
        for d, cut in enumerate(cuts):
            _fill_segments(out, d, self._block_steps(round_index, d), cut)
        if isinstance(self.units, PairUnits) and out.census.size:
            sampled = self.participants(round_index)
            self.units.fill_census(out.census, out.census_pairs, sampled)
        return out

    def _empty_round(self, round_index: int, shape: Shape) -> RoundSchedule:
        """A round's schedule in which no lane has anything to do yet."""
        d_, v_, j_, t_, g_, m_ = shape
        units, none = self.units, len(self._steps)
        taking_part = np.full(self.cohort_size, self.partition.num_clients, np.int32)
        sampled = self.participants(round_index)
        trained = np.sort(sampled[self.partition.sizes[sampled] > 0])
        taking_part[: len(trained)] = trained
        return RoundSchedule(
            round=np.array(round_index, np.int32),
            num_clients=np.array(self.partition.num_clients, np.int32),
            evaluate=np.array(
                (round_index + 1) % self.eval_every == 0 or round_index >= self.rounds - 5
            ),
            trial=np.array(False),
            share=np.zeros((), np.float32),
            longest=np.zeros((), np.int32),
            client_ids=np.full((d_, v_, j_), none, np.int32),
            rows=np.full((d_, v_, j_), none, np.int32),
            weights=np.zeros((d_, v_, j_), np.float32),
            num_samples=np.zeros((d_, v_, j_), np.int32),
            num_steps=np.zeros((d_, v_, j_), np.int32),
            seeds=np.zeros((d_, v_, j_, units.num_seeds), np.int32),
            batches=np.zeros((d_, t_, v_, self.batch_size), np.int32),
            batch_sizes=np.zeros((d_, t_, v_), np.int32),
            num_segments=np.zeros(d_, np.int32),
            segment_ends=np.zeros((d_, g_), np.int32),
            slots=np.zeros((d_, g_, v_), np.int32),
            starts=np.zeros((d_, g_, v_), bool),
            ends=np.zeros((d_, g_, v_), bool),
            participants=taking_part,
            census=np.zeros((d_, m_, self.batch_size), np.int32),
            census_pairs=np.zeros((d_, m_, self.batch_size), np.int32),
        )

    def _fill_lanes(self, out: RoundSchedule, round_index: int) -> None:
        """Every lane's clients, one after the other, and their minibatches."""
        units, sizes, lanes = self.units, self.units.sizes, self._packed[round_index]
        present = np.concatenate([np.asarray(lane, np.int64) for lane in lanes])
        counts = sizes if self.averaging == "weighted" else np.sign(sizes)
        total = counts[present].sum()
        out.share[...] = total / max(counts.sum(), 1)
        for index, lane in enumerate(lanes):
            d, v = divmod(index, self.shape.lanes)
            step = 0
            for j, client in enumerate(lane):
                out.client_ids[d, v, j] = out.rows[d, v, j] = client
                out.weights[d, v, j] = counts[client] / total
                out.num_samples[d, v, j] = sizes[client]
                out.num_steps[d, v, j] = self._steps[client]
                out.seeds[d, v, j] = units.seeds(self.seed, round_index, client)
                batches, batch_sizes = self.client_batches(round_index, client)
                out.batches[d, step : step + len(batches), v] = batches
                out.batch_sizes[d, step : step + len(batches), v] = batch_sizes
                step += len(batches)

    def first_step(self, round_index: int, shape: Shape | None = None) -> RoundSchedule:
        """One round cut to the first step of every lane's first client."""
        full = self.round(round_index, shape)
        busy = full.num_steps[:, :, 0] > 0  # [D, V]
        single = np.zeros_like(full.num_steps)
        single[:, :, 0] = busy
        opening = (np.arange(full.segment_ends.shape[1]) == 0)[:, None]  # [G, 1]: the only segment
        return full._replace(
            trial=np.array(True),
            longest=np.array(busy.any(), np.int32),
            num_steps=single,
            num_segments=np.asarray(busy.any(1), np.int32),
            segment_ends=np.ones_like(full.segment_ends),
            starts=opening & busy[:, None],
            ends=opening & busy[:, None],
            slots=np.zeros_like(full.slots),
            evaluate=np.array(True),
        )

    def _block_steps(self, round_index: int, block: int) -> list[np.ndarray]:
        """Steps of every client of every lane of a block."""
        v_ = self.shape.lanes
        lanes = self._packed[round_index][block * v_ : (block + 1) * v_]
        return [self._steps[lane] for lane in lanes]

    def _totals(self, of_units: np.ndarray) -> np.ndarray:
        """`[R]` sums over the units of every round."""
        return np.array([sum(of_units[lane].sum() for lane in lanes) for lanes in self._packed])

    def _length(self, lane: list[int]) -> int:
        return int(self._steps[lane].sum()) if len(lane) else 0

    def _pack(self, round_index: int, blocks: int, lanes: int) -> list[list[int]]:
        """Longest client first onto the shortest lane; ties by client id, and over the blocks."""
        units = (unit for k in self.participants(round_index) for unit in self.units.of_client(k))
        drawn = [int(unit) for unit in units if self._steps[unit] > 0]
        drawn.sort(key=lambda c: (-self._steps[c], c))
        heap = [(0, v, d) for v in range(lanes) for d in range(blocks)]
        packed: list[list[int]] = [[] for _ in heap]
        for client in drawn:
            length, v, d = heapq.heappop(heap)
            packed[d * lanes + v].append(client)
            heapq.heappush(heap, (length + int(self._steps[client]), v, d))
        return packed


def common_shape(schedulers: Sequence[Scheduler], width: int = 1) -> Shape:
    """A shape that holds for every round of several runs, `width` of them in step."""
    shapes = [s.shape for s in schedulers]
    common = Shape(*map(max, zip(*shapes, strict=True)))
    if width == 1:
        return common
    groups = [schedulers[i : i + width] for i in range(0, len(schedulers), width)]
    cuts = (
        len(cut)
        for group in groups
        for r in range(group[0].rounds)
        for cut in merged_cuts(group, r)
    )
    return common._replace(segments=_most(cuts))


def useful_fraction(schedulers: Sequence[Scheduler], *, together: bool) -> float:
    """Client samples per sample slot that the lanes run through, idle lanes included.

    Args:
      schedulers: of runs that go in step: each waits for the longest.
      together: whether a run's blocks wait for each other; else one follows the other.
    """
    longest = np.max([s.work.block_steps for s in schedulers], axis=0)  # [R, D]
    steps = longest.max(1) * longest.shape[1] if together else longest.sum(1)
    first = schedulers[0]
    run = steps.sum() * first.shape.lanes * first.batch_size * len(schedulers)
    samples = sum(s.work.samples.sum() for s in schedulers)
    return float(samples / run) if run else 1.0


def merged_cuts(schedulers: Sequence[Scheduler], round_index: int) -> list[np.ndarray]:
    """For every block, the steps at which a client of any of these runs ends."""
    every = zip(*(s.cuts(round_index) for s in schedulers), strict=True)
    return [np.unique(np.concatenate(cuts)) for cuts in every]


def stack_rounds(rounds: Sequence[RoundSchedule], capacity: int) -> RoundSchedule:
    """Rounds as `[capacity, ...]`; the rest is padding, copies of the last."""
    rounds = [*rounds, *[rounds[-1]] * (capacity - len(rounds))]
    return RoundSchedule(*map(np.stack, zip(*rounds, strict=True)))


def cohort_size(num_clients: int, participation: float) -> int:
    """Clients sampled each round: the share rounded down, but never none."""
    return max(1, int(num_clients * participation + 1e-9))


def with_rows(schedule: RoundSchedule, ids: np.ndarray, num_rows: int) -> RoundSchedule:
    """The schedule for states of which row i is that of client `ids[i]` (ascending)."""
    used = schedule.client_ids < schedule.num_clients.reshape(-1, 1, 1, 1)
    rows = np.where(used, np.searchsorted(ids, schedule.client_ids), num_rows)
    return schedule._replace(rows=rows.astype(np.int32))


def _rounded_up(size: int) -> int:
    """To 1, 2, 3, 4, 6, 8, 12, ...: runs on other partitions then share a compilation.

    It costs memory only, since the device runs as many steps as there are.
    """
    power = 1 << (size.bit_length() - 1)
    return next(s for s in (power, power * 3 // 2, power * 2) if s >= size)


def _most(sizes: Iterable[int]) -> int:
    return _rounded_up(max([1, *sizes]))


def _cuts(lane_steps: list[np.ndarray]) -> np.ndarray:
    """Steps at which a client of any of a block's lanes ends."""
    ends = [np.cumsum(steps) for steps in lane_steps if len(steps)]
    return np.unique(np.concatenate(ends)) if ends else np.zeros(0, np.int64)


def _fill_segments(
    out: RoundSchedule, d: int, lane_steps: list[np.ndarray], cuts: np.ndarray
) -> None:
    out.num_segments[d] = len(cuts)
    out.segment_ends[d, : len(cuts)] = cuts
    begins = np.concatenate([[0], cuts[:-1]]) if len(cuts) else cuts
    for v, steps in enumerate(lane_steps):
        if not len(steps):
            continue
        client_ends = np.cumsum(steps)
        slot = np.minimum(np.searchsorted(client_ends, begins, side="right"), len(steps) - 1)
        out.slots[d, : len(cuts), v] = slot
        out.starts[d, : len(cuts), v] = begins == (client_ends - steps)[slot]
        out.ends[d, : len(cuts), v] = cuts == client_ends[slot]
