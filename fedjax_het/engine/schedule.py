"""The host's half of a round: who takes part, in which order their samples come, on which lane.

Everything is drawn with NumPy from (seed, round, client id), so every method of a comparison
sees the same clients and the same minibatches. Clients are sequences of minibatch steps; they
are packed on lanes of nearly equal length instead of being padded to the longest.

Axes: D devices, V lanes per device, J client slots per lane, T steps per lane, B batch,
G segments. A segment is a stretch of steps of one device in which no client starts or ends;
with one lane per device every client is one segment.
"""

import heapq
from typing import NamedTuple

import numpy as np

from fedjax_het.data import Partition
from fedjax_het.engine.randomness import Stream, host_rng


class RoundSchedule(NamedTuple):
    """One round's work, padded to the run's largest round (or `[R, ...]` for a chunk)."""

    round: np.ndarray  # [] int32, from 0
    evaluate: np.ndarray  # [] bool
    client_ids: np.ndarray  # [D, V, J] int32; num_clients where the slot is unused
    weights: np.ndarray  # [D, V, J] float32, sum to 1 over the round's clients
    num_samples: np.ndarray  # [D, V, J] int32
    num_steps: np.ndarray  # [D, V, J] int32
    batches: np.ndarray  # [D, T, V, B] int32 indices of training examples
    batch_sizes: np.ndarray  # [D, T, V] int32; entries beyond the size are padding
    num_segments: np.ndarray  # [D] int32
    segment_ends: np.ndarray  # [D, G] int32: step at which the segment stops
    slots: np.ndarray  # [D, G, V] int32: which of the lane's clients
    starts: np.ndarray  # [D, G, V] bool: a client's first step opens this segment
    ends: np.ndarray  # [D, G, V] bool: a client's last step closes it


class Shape(NamedTuple):
    """Static sizes that hold for every round of a run."""

    devices: int
    lanes: int  # per device
    slots: int
    steps: int
    segments: int


class Work(NamedTuple):
    """What the rounds of a run amount to, per round: `[R]` each."""

    participants: np.ndarray  # sampled clients that hold data
    samples: np.ndarray  # client samples processed
    lane_steps: np.ndarray  # steps of the longest lane

    def useful_fraction(self, shape: Shape, batch_size: int) -> float:
        """Client samples per sample slot that the lanes ran through, idle lanes included."""
        run = self.lane_steps.sum() * shape.devices * shape.lanes * batch_size
        return float(self.samples.sum() / run) if run else 1.0


class Scheduler:
    """Makes the schedule of any round of a run, in any order.

    Args:
      partition: which training examples each client holds.
      participation: share of the clients sampled each round, uniformly without replacement;
        max(1, int(num_clients * participation)) of them. A sampled client without data has
        nothing to train and is left out of the average.
      passes: passes over a client's data each round, each with a fresh shuffle; the last,
        smaller batch of a pass is kept.
      averaging: "uniform" or "weighted" (by samples).
    """

    def __init__(
        self,
        partition: Partition,
        *,
        seed: int,
        rounds: int,
        participation: float,
        passes: int,
        batch_size: int,
        averaging: str,
        eval_every: int,
        devices: int,
        lanes: int,
    ):
        self.partition, self.seed, self.rounds = partition, seed, rounds
        self.passes, self.batch_size, self.averaging = passes, batch_size, averaging
        self.eval_every = eval_every
        self.cohort_size = cohort_size(partition.num_clients, participation)
        self._steps = passes * -(-partition.sizes // batch_size)  # [K]
        packed = [self._pack(r, devices, lanes) for r in range(rounds)]
        self._packed = packed
        most = lambda values: _rounded_up(max([1, *values]))  # noqa: E731
        self.shape = Shape(
            devices,
            lanes,
            slots=most(len(lane) for lanes_ in packed for lane in lanes_),
            steps=most(self._length(lane) for lanes_ in packed for lane in lanes_),
            segments=most(
                len(_cuts([self._steps[lane] for lane in lanes_[d * lanes : (d + 1) * lanes]]))
                for lanes_ in packed
                for d in range(devices)
            ),
        )
        self.work = Work(
            participants=np.array([sum(map(len, lanes_)) for lanes_ in packed]),
            samples=np.array(
                [sum(passes * partition.sizes[lane].sum() for lane in lanes_) for lanes_ in packed]
            ),
            lane_steps=np.array([max(map(self._length, lanes_)) for lanes_ in packed]),
        )

    def participants(self, round_index: int) -> np.ndarray:
        """Ids of the clients sampled in a round, in the order they were drawn."""
        rng = host_rng(self.seed, Stream.PARTICIPATION, round_index)
        return rng.choice(self.partition.num_clients, self.cohort_size, replace=False)

    def client_batches(self, round_index: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's minibatches of a round: indices `[steps, B]` and sizes `[steps]`.

        A batch that is not full is filled up with samples of the client's own, which the loss
        masks: only batch-norm statistics can see them.
        """
        rng = host_rng(self.seed, Stream.BATCHES, round_index, client)
        mine, size = self.partition.client(client), self.batch_size
        per_pass = -(-len(mine) // size)
        padded = np.zeros((self.passes, per_pass * size), np.int32)
        for p in range(self.passes):
            padded[p] = np.resize(rng.permutation(mine), per_pass * size)
        sizes = np.full((self.passes, per_pass), size, np.int32)
        if len(mine) % size:
            sizes[:, -1] = len(mine) % size
        return padded.reshape(-1, size), sizes.reshape(-1)

    def round(self, round_index: int) -> RoundSchedule:
        """The schedule of one round, padded to `self.shape`."""
        d_, v_, j_, t_, g_ = self.shape
        lanes = self._packed[round_index]
        out = RoundSchedule(
            round=np.int32(round_index),
            evaluate=np.bool_(
                (round_index + 1) % self.eval_every == 0 or round_index >= self.rounds - 5
            ),
            client_ids=np.full((d_, v_, j_), self.partition.num_clients, np.int32),
            weights=np.zeros((d_, v_, j_), np.float32),
            num_samples=np.zeros((d_, v_, j_), np.int32),
            num_steps=np.zeros((d_, v_, j_), np.int32),
            batches=np.zeros((d_, t_, v_, self.batch_size), np.int32),
            batch_sizes=np.zeros((d_, t_, v_), np.int32),
            num_segments=np.zeros(d_, np.int32),
            segment_ends=np.zeros((d_, g_), np.int32),
            slots=np.zeros((d_, g_, v_), np.int32),
            starts=np.zeros((d_, g_, v_), bool),
            ends=np.zeros((d_, g_, v_), bool),
        )
        present = np.concatenate([np.asarray(lane, np.int64) for lane in lanes])
        sizes = self.partition.sizes
        total = sizes[present].sum() if self.averaging == "weighted" else len(present)
        for index, lane in enumerate(lanes):
            d, v = divmod(index, v_)
            step = 0
            for j, client in enumerate(lane):
                share = sizes[client] if self.averaging == "weighted" else 1
                out.client_ids[d, v, j] = client
                out.weights[d, v, j] = share / total
                out.num_samples[d, v, j] = sizes[client]
                out.num_steps[d, v, j] = self._steps[client]
                batches, batch_sizes = self.client_batches(round_index, client)
                out.batches[d, step : step + len(batches), v] = batches
                out.batch_sizes[d, step : step + len(batches), v] = batch_sizes
                step += len(batches)
        for d in range(d_):
            _fill_segments(out, d, [self._steps[lane] for lane in lanes[d * v_ : (d + 1) * v_]])
        return out

    def chunk(self, first: int, count: int, capacity: int) -> RoundSchedule:
        """Rounds `first .. first+count-1` stacked to `[capacity, ...]`; the rest is padding."""
        rounds = [self.round(r) for r in range(first, first + count)]
        rounds += [rounds[-1]] * (capacity - count)
        return RoundSchedule(*map(np.stack, zip(*rounds, strict=True)))

    def first_step(self, round_index: int, capacity: int) -> RoundSchedule:
        """One round cut to the first step of every lane's first client, in a chunk's shape."""
        full = self.round(round_index)
        busy = full.num_steps[:, :, 0] > 0  # [D, V]
        single = np.zeros_like(full.num_steps)
        single[:, :, 0] = busy
        opening = (np.arange(self.shape.segments) == 0)[:, None]  # [G, 1]: the only segment
        short = full._replace(
            num_steps=single,
            num_segments=busy.any(1).astype(np.int32),
            segment_ends=np.ones_like(full.segment_ends),
            starts=opening & busy[:, None],
            ends=opening & busy[:, None],
            slots=np.zeros_like(full.slots),
            evaluate=np.bool_(True),
        )
        return RoundSchedule(*(np.stack([leaf] * capacity) for leaf in short))

    def _length(self, lane: list[int]) -> int:
        return int(self._steps[lane].sum()) if len(lane) else 0

    def _pack(self, round_index: int, devices: int, lanes: int) -> list[list[int]]:
        """Longest client first onto the shortest lane; ties by client id and lane number."""
        drawn = [int(c) for c in self.participants(round_index) if self._steps[c] > 0]
        drawn.sort(key=lambda c: (-self._steps[c], c))
        heap = [(0, lane) for lane in range(devices * lanes)]
        packed: list[list[int]] = [[] for _ in heap]
        for client in drawn:
            length, lane = heapq.heappop(heap)
            packed[lane].append(client)
            heapq.heappush(heap, (length + int(self._steps[client]), lane))
        return packed


def cohort_size(num_clients: int, participation: float) -> int:
    """Clients sampled each round: the share rounded down, but never none."""
    return max(1, int(num_clients * participation + 1e-9))


def _rounded_up(size: int) -> int:
    """To 1, 2, 3, 4, 6, 8, 12, ...: runs on other partitions then share a compilation.

    It costs memory only, since the device runs as many steps as there are.
    """
    power = 1 << (size.bit_length() - 1)
    return next(s for s in (power, power * 3 // 2, power * 2) if s >= size)


def _cuts(lane_steps: list[np.ndarray]) -> np.ndarray:
    """Steps at which a client of any of a device's lanes ends."""
    ends = [np.cumsum(steps) for steps in lane_steps if len(steps)]
    return np.unique(np.concatenate(ends)) if ends else np.zeros(0, np.int64)


def _fill_segments(out: RoundSchedule, d: int, lane_steps: list[np.ndarray]) -> None:
    cuts = _cuts(lane_steps)
    out.num_segments[d] = len(cuts)
    out.segment_ends[d, : len(cuts)] = cuts
    begins = np.concatenate([[0], cuts[:-1]]) if len(cuts) else cuts
    for v, steps in enumerate(lane_steps):
        if not len(steps):
            continue
        client_ends = np.cumsum(steps)
        slot = np.minimum(np.searchsorted(client_ends, begins, side="right"), len(steps) - 1)
        out.slots[d, : len(cuts), v] = slot
        out.starts[d, : len(cuts), v] = np.isin(begins, client_ends - steps)
        out.ends[d, : len(cuts), v] = np.isin(cuts, client_ends)
