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
from fedjax_het.engine.units import ClientUnits, PairUnits, counted


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
        drawn = [self.participants(r) for r in range(rounds)]
        packed = [self._pack(clients, blocks * lanes, lanes) for clients in drawn]
        self._packed = packed
        lengths = np.array([self._lengths(round_) for round_ in packed])  # [R, D * V]
        self.shape = Shape(
            blocks,
            lanes,
            slots=_most(int(round_.counts.max()) for round_ in packed),
            steps=_most([int(lengths.max(initial=0))]),
            segments=0,
        )
        cuts = (len(cut) for r in range(rounds) for cut in self.cuts(r))
        self.shape = self.shape._replace(segments=_most(cuts))
        if isinstance(self.units, PairUnits) and self.units.takes_census:
            self.shape = self.shape._replace(census=self.units.census_batches(blocks))
        self.work = Work(
            participants=np.array([int((partition.sizes[each] > 0).sum()) for each in drawn]),
            pairs=self._totals(self.units.pairs),
            samples=self._totals(self.units.samples),
            block_steps=lengths.reshape(rounds, blocks, lanes).max(2),
        )

    def participants(self, round_index: int) -> np.ndarray:
        """Ids of the clients sampled in a round, in the order they were drawn."""
        rng = host_rng(self.seed, Stream.PARTICIPATION, round_index)
        return rng.choice(self.partition.num_clients, self.cohort_size, replace=False)

    def evaluates(self, round_index: int) -> bool:
        """Whether an evaluation is due after a round: every so many, and after the last five."""
        return (round_index + 1) % self.eval_every == 0 or round_index >= self.rounds - 5

    def trained(self, rounds: Iterable[int]) -> np.ndarray:
        """Ids of the clients, or pairs, that the lanes run through in these rounds, ascending."""
        return np.unique(np.concatenate([self._packed[r].units for r in rounds]))

    def client_batches(self, round_index: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's minibatches of a round: indices `[steps, B]` and sizes `[steps]`."""
        return self.units.batches(self.seed, round_index, np.array([client]))

    def cuts(self, round_index: int) -> list[np.ndarray]:
        """For every block, the steps of a round at which a client of one of its lanes ends."""
        packed = self._packed[round_index]
        ends = self._ends(packed)
        return [np.unique(ends[part]) for part in packed.blocks(self.shape.lanes)]

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
        packed = self._packed[round_index]
        ends, steps = self._ends(packed), self._steps[packed.units]
        counts = packed.counts.reshape(self.shape.blocks, -1)
        for d, part in enumerate(packed.blocks(self.shape.lanes)):
            _fill_segments(out, d, counts[d], ends[part], steps[part], cuts[d])
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
            evaluate=np.array(self.evaluates(round_index)),
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
        packed, sizes = self._packed[round_index], self.units.sizes
        units, steps = packed.units, self._steps[packed.units]
        counts = sizes if self.averaging == "weighted" else np.sign(sizes)
        total = counts[units].sum()
        out.share[...] = total / max(counts.sum(), 1)
        lanes = np.repeat(np.arange(len(packed.counts)), packed.counts)
        slots = (*np.divmod(lanes, self.shape.lanes), counted(packed.counts))
        out.client_ids[slots] = out.rows[slots] = units
        out.weights[slots] = counts[units] / total
        out.num_samples[slots], out.num_steps[slots] = sizes[units], steps
        if self.units.num_seeds:
            out.seeds[slots] = self.units.seeds(self.seed, round_index, units)
        d, v = np.divmod(np.repeat(lanes, steps), self.shape.lanes)
        t = counted(np.bincount(lanes, steps, len(packed.counts)).astype(np.int64))
        batches, batch_sizes = self.units.batches(self.seed, round_index, units)
        out.batches[d, t, v], out.batch_sizes[d, t, v] = batches, batch_sizes

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

    def _ends(self, packed: "_Packed") -> np.ndarray:
        """The step of its lane at which each unit ends."""
        ends = self._steps[packed.units].cumsum()
        return ends - np.repeat(np.concatenate([[0], ends])[packed.firsts[:-1]], packed.counts)

    def _lengths(self, packed: "_Packed") -> np.ndarray:
        """Steps of each lane."""
        return np.diff(np.concatenate([[0], self._steps[packed.units].cumsum()])[packed.firsts])

    def _totals(self, of_units: np.ndarray) -> np.ndarray:
        """`[R]` sums over the units of every round."""
        return np.array([of_units[packed.units].sum() for packed in self._packed])

    def _pack(self, clients: np.ndarray, lanes: int, per_block: int) -> "_Packed":
        """Longest client first onto the shortest lane; ties by client id, and over the blocks."""
        units = self.units.of_clients(clients)
        units = units[self._steps[units] > 0]
        units = units[np.lexsort((units, -self._steps[units]))]
        blocks = lanes // per_block
        heap = [(0, v, d) for v in range(per_block) for d in range(blocks)]
        chosen = []
        for steps in self._steps[units].tolist():
            length, v, d = heap[0]
            chosen.append(d * per_block + v)
            heapq.heapreplace(heap, (length + steps, v, d))
        of_lane = np.array(chosen, np.int64)
        in_order = np.argsort(of_lane, kind="stable")
        return _Packed(units[in_order].astype(np.int32), np.bincount(of_lane, minlength=lanes))


class _Packed(NamedTuple):
    """Which units a round's lanes run through."""

    units: np.ndarray  # [N] one lane's after the other's, block after block
    counts: np.ndarray  # [D * V] of each lane

    @property
    def firsts(self) -> np.ndarray:
        """[D * V + 1] where each lane begins among the units."""
        return np.concatenate([[0], self.counts.cumsum()])

    def blocks(self, lanes: int) -> list[slice]:
        """Each block's units, of so many lanes."""
        return [slice(*pair) for pair in itertools.pairwise(self.firsts[::lanes].tolist())]


def common_shape(schedulers: Sequence[Scheduler], width: int = 1) -> Shape:
    """A shape that holds for every round of several runs, any `width` of them in step: which ones
    these are may depend on what ends early, and on what other workers have taken."""
    shapes = [s.shape for s in schedulers]
    common = Shape(*map(max, zip(*shapes, strict=True)))
    if width == 1:
        return common
    rounds = range(schedulers[0].rounds)
    cuts = (len(cut) for r in rounds for cut in merged_cuts(schedulers, r))
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


def _fill_segments(
    out: RoundSchedule,
    d: int,
    counts: np.ndarray,
    unit_ends: np.ndarray,
    unit_steps: np.ndarray,
    cuts: np.ndarray,
) -> None:
    """Write block d's segments: its lanes have so many units, which end at these steps of theirs
    and take so many."""
    number = len(cuts)
    out.num_segments[d] = number
    if not number:
        return
    out.segment_ends[d, :number] = cuts
    begins = np.concatenate([[0], cuts[:-1]])
    # One search for all lanes, each of which is moved behind the one before.
    busy = np.flatnonzero(counts)
    counts = counts[busy]
    firsts, lanes = counts.cumsum() - counts, np.arange(len(busy)) * (cuts[-1] + 1)
    wanted = begins[:, None] + lanes
    found = np.searchsorted(unit_ends + np.repeat(lanes, counts), wanted, side="right")
    unit = np.minimum(found, firsts + counts - 1)  # [G, busy lanes]; an idle lane's is its last
    out.slots[d, :number, busy] = (unit - firsts).T
    out.starts[d, :number, busy] = (begins[:, None] == (unit_ends - unit_steps)[unit]).T
    out.ends[d, :number, busy] = (cuts[:, None] == unit_ends[unit]).T
