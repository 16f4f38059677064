"""What the lanes run through: clients, or the classes that clients condense.

A unit is a sequence of minibatch steps that starts from what the server sent. Local training has
one unit per client. Condensation has one per pair of a client and a class, so that pairs that do
not exist cost nothing; or, where a client's classes are coupled, one per client.
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.common.errors import require
from fedjax_het.data import Partition
from fedjax_het.engine.randomness import Stream, host_rng, host_rngs


class ClientUnits:
    """Clients that go through their data, `passes` times with a fresh shuffle each; the last,
    smaller batch of a pass is kept.

    Args:
      steps: at most so many batches of it all (default: all).
      further: batches after the `passes`, of as many passes more as it takes, each with a fresh
        shuffle too; only the last may be cut off.
      stream: whose randomness shuffles.
    """

    num_seeds = 0
    takes_census = False

    def __init__(
        self,
        partition: Partition,
        passes: int,
        batch_size: int,
        *,
        steps: int | None = None,
        further: int = 0,
        stream: Stream = Stream.BATCHES,
    ):
        self._partition, self.batch_size = partition, batch_size
        self._stream = stream
        self.sizes = partition.sizes  # [U] examples held
        per_pass = -(-partition.sizes // batch_size)
        most = passes * per_pass + further * (per_pass > 0)
        self._passes = -(-most // np.maximum(per_pass, 1))  # [U] begun in a round
        self.steps = most if steps is None else np.minimum(most, steps)  # [U] in a round
        # [U] processed in a round: whole passes, and full batches of the last one
        passed = self.steps // np.maximum(per_pass, 1)
        self.samples = passed * partition.sizes + (self.steps - passed * per_pass) * batch_size
        self.pairs = np.zeros_like(partition.sizes)

    def of_clients(self, clients: np.ndarray) -> np.ndarray:
        """Their units, client after client."""
        return clients

    def seeds(self, seed: int, round_index: int, units: np.ndarray) -> np.ndarray:
        """Real examples that each unit starts from, `[n, I]`."""
        return np.zeros((len(units), 0), np.int32)

    def batches(
        self, seed: int, round_index: int, units: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Indices `[steps, B]` and sizes `[steps]`, of one unit after the other.

        A batch that is not full is filled up with samples of the client's own, which the loss
        masks: only batch-norm statistics can see them.
        """
        sizes, passes = self.sizes[units], self._passes[units]
        per_pass = -(-sizes // self.batch_size)
        order = self._shuffled(seed, round_index, units)
        # A pass begins where the last one ended: in `order`, in padded entries, and in batches.
        held, filled = np.repeat(sizes, passes), np.repeat(per_pass, passes)
        entries = filled * self.batch_size
        within = counted(entries)
        at = np.repeat(held.cumsum() - held, entries) + within % np.repeat(held, entries)
        batch_sizes = np.full(filled.sum(), self.batch_size, np.int32)
        left = held % self.batch_size
        batch_sizes[(filled.cumsum() - 1)[left > 0]] = left[left > 0]
        whole = order[at].astype(np.int32).reshape(-1, self.batch_size)
        made, wanted = passes * per_pass, self.steps[units]
        if (made == wanted).all():
            return whole, batch_sizes
        kept = counted(made) < np.repeat(wanted, made)
        return whole[kept], batch_sizes[kept]

    def _shuffled(self, seed: int, round_index: int, units: np.ndarray) -> np.ndarray:
        """What they hold, unit after unit, each once for every pass in an order of its own."""
        sizes, offsets, passes = self.sizes[units], self._partition.offsets, self._passes[units]
        repeated = np.repeat(sizes, passes)
        order = np.repeat(np.repeat(offsets[units], passes), repeated) + counted(repeated)
        order = self._partition.indices[order]
        end = 0
        rngs = host_rngs(seed, self._stream, round_index, units)
        for size, times, rng in zip(sizes.tolist(), passes.tolist(), rngs, strict=True):
            for _ in range(times):
                end += size
                rng.shuffle(order[end - size : end])
        return order


def counted(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each length, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


class PairWork(NamedTuple):
    """How a method's clients condense; static.

    ipc: images of each class (the literature's "images per class").
    steps: of condensation, each with a batch of real images of the class.
    threshold: classes of which a client holds fewer examples are dropped.
    seeds_per_image: real examples that a synthetic image starts from; 0 for none.
    top_up: fill a batch of a class with fewer examples than its size up with repeated ones, as
      FedDM's public code does; else the batch is the whole class.
    by_client: a unit is a client with all its classes, which take turns in every step.
    census: every round all of a client's examples are needed, by class.
    """

    ipc: int
    steps: int
    threshold: int
    seeds_per_image: int = 0
    top_up: bool = False
    by_client: bool = False
    census: bool = False


class PairUnits:
    """Pairs of a client k and a class c, with the number k * C + c; or clients, `by_client`.

    Raises ConfigError if no client could fill a class: `ipc` or the threshold is too large.
    """

    def __init__(
        self,
        partition: Partition,
        labels: np.ndarray,
        num_classes: int,
        work: PairWork,
        batch_size: int,
    ):
        counts = partition.label_counts(labels, num_classes)  # [K, C]
        most = int(counts.max())
        require(work.ipc <= most, "ipc", work.ipc, f"at most {most}, the most that a client holds")
        require(
            work.threshold <= most,
            "threshold",
            work.threshold,
            f"at most {most}, the most examples of one class that a client holds",
        )
        self._partition, self._labels, self._work = partition, np.asarray(labels), work
        self._num_classes, self.batch_size = num_classes, batch_size
        self._kept = counts >= max(1, work.threshold)  # [K, C]
        self.takes_census = work.census
        images = work.ipc * work.seeds_per_image
        self.num_seeds = images * (num_classes if work.by_client else 1)
        seen = counts if not work.top_up else np.maximum(counts, batch_size)
        samples = work.steps * np.where(self._kept, np.minimum(seen, batch_size), 0)
        kept = self._kept.astype(np.int64)

        def axis(of_pairs: np.ndarray) -> np.ndarray:
            return of_pairs.sum(1) if work.by_client else np.ravel(of_pairs)

        self.sizes, self.samples = axis(np.where(self._kept, counts, 0)), axis(samples)
        self.pairs, self.steps = axis(kept), work.steps * axis(kept)

    def of_clients(self, clients: np.ndarray) -> np.ndarray:
        """Their units, client after client."""
        if self._work.by_client:
            return clients
        return (clients[:, None] * self._num_classes + np.arange(self._num_classes)).reshape(-1)

    def seeds(self, seed: int, round_index: int, units: np.ndarray) -> np.ndarray:
        """Real examples that each unit starts from, `[n, I]`: for each image different ones, as far
        as there are."""
        drawn = [self._seeds(seed, round_index, int(unit)) for unit in units]
        return np.stack(drawn) if drawn else np.zeros((0, self.num_seeds), np.int32)

    def batches(
        self, seed: int, round_index: int, units: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Indices `[steps, B]` and sizes `[steps]`, of one unit after the other; the classes of a
        client take turns.

        Every step draws anew, without replacement.
        """
        made = [self._batches(seed, round_index, int(unit)) for unit in units]
        none = np.zeros((0, self.batch_size), np.int32), np.zeros(0, np.int32)
        indices, sizes = zip(none, *made, strict=True)
        return np.concatenate(indices), np.concatenate(sizes)

    def _seeds(self, seed: int, round_index: int, unit: int) -> np.ndarray:
        per, ipc = self._work.seeds_per_image, self._work.ipc
        out = np.zeros((self._num_classes, ipc * per), np.int32)
        for client, label in self._pairs_of(unit):
            held = self._examples(client, label)
            rng = self._rng(seed, round_index, client, label, 1)
            drawn: np.ndarray | list[np.ndarray]
            if per == 1:
                rounds = -(-ipc // len(held))
                drawn = np.concatenate([rng.permutation(held) for _ in range(rounds)])[:ipc]
            else:
                drawn = [
                    rng.choice(held, per, replace=len(held) < per) for _ in range(ipc * (per > 0))
                ]
            out[label] = np.reshape(drawn, -1)
        if self._work.by_client:
            return out.reshape(-1)
        return out[unit % self._num_classes]

    def _batches(self, seed: int, round_index: int, unit: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = [self._draws(seed, round_index, *pair) for pair in self._pairs_of(unit)]
        indices = np.stack([i for i, _ in drawn], 1)  # [steps, classes of the unit, B]
        sizes = np.array([size for _, size in drawn], np.int32)
        return indices.reshape(-1, self.batch_size), np.tile(sizes, self._work.steps)

    def census_batches(self, blocks: int) -> int:
        """Batches of each block that hold the examples of all clients: every round's, at most."""
        return -(-len(self._partition.indices) // (blocks * self.batch_size))

    def fill_census(self, examples: np.ndarray, pairs: np.ndarray, clients: np.ndarray) -> None:
        """Write all examples of these clients, and their pairs, to `[D, M, B]` each.

        Batch after batch, one to each block in turn; what is left over is padding.
        """
        present = np.sort(clients)
        held = np.concatenate([self._held(k) for k in present])
        owner = np.repeat(present, self._partition.sizes[present])
        none = self._partition.num_clients * self._num_classes
        blocks, batches, size = pairs.shape
        for out, values, padding in (
            (examples, held, 0),
            (pairs, owner * self._num_classes + self._labels[held], none),
        ):
            flat = np.full(out.size, padding, out.dtype)
            flat[: len(held)] = values
            out[...] = flat.reshape(batches, blocks, size).swapaxes(0, 1)

    def _pairs_of(self, unit: int) -> list[tuple[int, int]]:
        if self._work.by_client:
            return [(unit, int(label)) for label in np.flatnonzero(self._kept[unit])]
        return [divmod(unit, self._num_classes)]

    def _examples(self, client: int, label: int) -> np.ndarray:
        held = self._held(client)
        return held[self._labels[held] == label]

    def _held(self, client: int) -> np.ndarray:
        offsets = self._partition.offsets
        return self._partition.indices[offsets[client] : offsets[client + 1]]

    def _rng(self, seed: int, round_index: int, client: int, label: int, use: int):
        pair = client * self._num_classes + label
        return host_rng(seed, Stream.BATCHES, round_index, pair, use)

    def _draws(self, seed: int, round_index: int, client: int, label: int):
        """A pair's batches `[steps, B]`, and how many entries of each count."""
        held, size = self._examples(client, label), self.batch_size
        rng, steps = self._rng(seed, round_index, client, label, 0), self._work.steps
        if len(held) > size:
            out = np.empty((steps, size), np.int32)
            for first in range(0, steps, 100):
                some = out[first : first + 100]
                order = rng.random((len(some), len(held)), dtype=np.float32)
                some[...] = held[np.argpartition(order, size, axis=1)[:, :size]]
            return out, size
        if self._work.top_up:
            again = held[rng.integers(0, len(held), (steps, size - len(held)))]
            return np.hstack([np.tile(held, (steps, 1)), again]).astype(np.int32), size
        return np.tile(np.resize(held, size), (steps, 1)).astype(np.int32), len(held)
