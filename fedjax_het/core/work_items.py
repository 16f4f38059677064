"""What the lanes run through: clients, or the classes that clients condense.

A unit is a sequence of minibatch steps that starts from what the server sent. Local training has
one unit per client. Condensation has one per pair of a client and a class, so that pairs that do
not exist cost nothing; or, where a client's classes are coupled, one per client.
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.core.rng import Stream, iter_host_rngs, make_host_rng
from fedjax_het.data import Partition
from fedjax_het.utils.errors import require


class ClientWork:
    """Clients that go through their data, `passes` times with a fresh shuffle each; the last,
    smaller batch of a pass is kept.

    Args:
      steps: at most so many batches of it all (default: all).
      further: batches after the `passes`, of as many passes more as it takes, each with a fresh
        shuffle too; only the last may be cut off.
      stream: whose randomness shuffles.
    """

    num_init_examples = 0
    needs_full_pass = False

    def __init__(
        self,
        partition: Partition,
        num_passes: int,
        batch_size: int,
        *,
        max_num_steps: int | None = None,
        extra_batches: int = 0,
        stream: Stream = Stream.BATCHES,
    ):
        self._partition, self.batch_size = partition, batch_size
        self._stream = stream
        self.sizes = partition.sizes  # [U] examples held
        per_pass = -(-partition.sizes // batch_size)
        max_steps = num_passes * per_pass + extra_batches * (per_pass > 0)
        self._num_passes = -(-max_steps // np.maximum(per_pass, 1))  # [U] begun in a round
        self.num_steps = (
            max_steps if max_num_steps is None else np.minimum(max_steps, max_num_steps)
        )  # [U] in a round
        # [U] processed in a round: whole passes, and full batches of the last one
        num_full_passes = self.num_steps // np.maximum(per_pass, 1)
        self.num_samples = (
            num_full_passes * partition.sizes
            + (self.num_steps - num_full_passes * per_pass) * batch_size
        )
        self.num_pairs = np.zeros_like(partition.sizes)

    def work_ids_of_clients(self, clients: np.ndarray) -> np.ndarray:
        """Their units, client after client."""
        return clients

    def draw_init_examples(self, seed: int, round_index: int, work_ids: np.ndarray) -> np.ndarray:
        """Real examples that each unit starts from, `[n, I]`."""
        return np.zeros((len(work_ids), 0), np.int32)

    def draw_batches(
        self, seed: int, round_index: int, work_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Indices `[steps, B]` and sizes `[steps]`, of one unit after the other.

        A batch that is not full is filled up with samples of the client's own, which the loss
        masks: only batch-norm statistics can see them.
        """
        sizes, num_passes = self.sizes[work_ids], self._num_passes[work_ids]
        per_pass = -(-sizes // self.batch_size)
        order = self._shuffle_examples(seed, round_index, work_ids)
        # A pass begins where the last one ended: in `order`, in padded entries, and in batches.
        pass_sizes, pass_batches = np.repeat(sizes, num_passes), np.repeat(per_pass, num_passes)
        padded_sizes = pass_batches * self.batch_size
        offset_in_pass = concatenate_aranges(padded_sizes)
        positions = np.repeat(
            pass_sizes.cumsum() - pass_sizes, padded_sizes
        ) + offset_in_pass % np.repeat(pass_sizes, padded_sizes)
        batch_sizes = np.full(pass_batches.sum(), self.batch_size, np.int32)
        remainder = pass_sizes % self.batch_size
        batch_sizes[(pass_batches.cumsum() - 1)[remainder > 0]] = remainder[remainder > 0]
        batches = order[positions].astype(np.int32).reshape(-1, self.batch_size)
        num_generated, num_required = num_passes * per_pass, self.num_steps[work_ids]
        if (num_generated == num_required).all():
            return batches, batch_sizes
        is_kept = concatenate_aranges(num_generated) < np.repeat(num_required, num_generated)
        return batches[is_kept], batch_sizes[is_kept]

    def _shuffle_examples(self, seed: int, round_index: int, work_ids: np.ndarray) -> np.ndarray:
        """What they hold, unit after unit, each once for every pass in an order of its own."""
        sizes, offsets, pass_counts = (
            self.sizes[work_ids],
            self._partition.offsets,
            self._num_passes[work_ids],
        )
        pass_sizes = np.repeat(sizes, pass_counts)
        order = np.repeat(
            np.repeat(offsets[work_ids], pass_counts), pass_sizes
        ) + concatenate_aranges(pass_sizes)
        order = self._partition.indices[order]
        end = 0
        rngs = iter_host_rngs(seed, self._stream, round_index, work_ids)
        for size, num_passes, rng in zip(sizes.tolist(), pass_counts.tolist(), rngs, strict=True):
            for _ in range(num_passes):
                end += size
                rng.shuffle(order[end - size : end])
        return order


def concatenate_aranges(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each length, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


class CondensationWork(NamedTuple):
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
    init_examples_per_image: int = 0
    repeats_examples: bool = False
    is_per_client: bool = False
    needs_full_pass: bool = False


class ClientClassWork:
    """Pairs of a client k and a class c, with the number k * C + c; or clients, `by_client`.

    Raises ConfigError if no client could fill a class: `ipc` or the threshold is too large.
    """

    def __init__(
        self,
        partition: Partition,
        labels: np.ndarray,
        num_classes: int,
        condensation: CondensationWork,
        batch_size: int,
    ):
        counts = partition.label_counts(labels, num_classes)  # [K, C]
        max_class_count = int(counts.max())
        require(
            condensation.ipc <= max_class_count,
            "ipc",
            condensation.ipc,
            f"at most {max_class_count}, the most that a client holds",
        )
        require(
            condensation.threshold <= max_class_count,
            "threshold",
            condensation.threshold,
            f"at most {max_class_count}, the most examples of one class that a client holds",
        )
        self._partition, self._labels, self._condensation = (
            partition,
            np.asarray(labels),
            condensation,
        )
        self._num_classes, self.batch_size = num_classes, batch_size
        self._has_pair = counts >= max(1, condensation.threshold)  # [K, C]
        self.needs_full_pass = condensation.needs_full_pass
        num_init_examples = condensation.ipc * condensation.init_examples_per_image
        self.num_init_examples = num_init_examples * (
            num_classes if condensation.is_per_client else 1
        )
        num_available = (
            counts if not condensation.repeats_examples else np.maximum(counts, batch_size)
        )
        samples = condensation.steps * np.where(
            self._has_pair, np.minimum(num_available, batch_size), 0
        )
        num_pairs = self._has_pair.astype(np.int64)

        def per_work_item(pair_values: np.ndarray) -> np.ndarray:
            return pair_values.sum(1) if condensation.is_per_client else np.ravel(pair_values)

        self.sizes, self.num_samples = (
            per_work_item(np.where(self._has_pair, counts, 0)),
            per_work_item(samples),
        )
        self.num_pairs, self.num_steps = (
            per_work_item(num_pairs),
            condensation.steps * per_work_item(num_pairs),
        )

    def work_ids_of_clients(self, clients: np.ndarray) -> np.ndarray:
        """Their units, client after client."""
        if self._condensation.is_per_client:
            return clients
        return (clients[:, None] * self._num_classes + np.arange(self._num_classes)).reshape(-1)

    def draw_init_examples(self, seed: int, round_index: int, work_ids: np.ndarray) -> np.ndarray:
        """Real examples that each unit starts from, `[n, I]`: for each image different ones, as far
        as there are."""
        init_examples = [
            self._draw_init_examples(seed, round_index, int(work_id)) for work_id in work_ids
        ]
        return (
            np.stack(init_examples)
            if init_examples
            else np.zeros((0, self.num_init_examples), np.int32)
        )

    def draw_batches(
        self, seed: int, round_index: int, work_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Indices `[steps, B]` and sizes `[steps]`, of one unit after the other; the classes of a
        client take turns.

        Every step draws anew, without replacement.
        """
        drawn_batches = [
            self._draw_work_item_batches(seed, round_index, int(work_id)) for work_id in work_ids
        ]
        empty = np.zeros((0, self.batch_size), np.int32), np.zeros(0, np.int32)
        indices, sizes = zip(empty, *drawn_batches, strict=True)
        return np.concatenate(indices), np.concatenate(sizes)

    def _draw_init_examples(self, seed: int, round_index: int, work_id: int) -> np.ndarray:
        num_per_image, ipc = self._condensation.init_examples_per_image, self._condensation.ipc
        init_examples_by_class = np.zeros((self._num_classes, ipc * num_per_image), np.int32)
        for client, label in self._pairs_of_work_item(work_id):
            class_examples = self._class_examples(client, label)
            rng = self._make_rng(seed, round_index, client, label, 1)
            init_examples: np.ndarray | list[np.ndarray]
            if num_per_image == 1:
                num_permutations = -(-ipc // len(class_examples))
                init_examples = np.concatenate(
                    [rng.permutation(class_examples) for _ in range(num_permutations)]
                )[:ipc]
            else:
                init_examples = [
                    rng.choice(
                        class_examples, num_per_image, replace=len(class_examples) < num_per_image
                    )
                    for _ in range(ipc * (num_per_image > 0))
                ]
            init_examples_by_class[label] = np.reshape(init_examples, -1)
        if self._condensation.is_per_client:
            return init_examples_by_class.reshape(-1)
        return init_examples_by_class[work_id % self._num_classes]

    def _draw_work_item_batches(
        self, seed: int, round_index: int, work_id: int
    ) -> tuple[np.ndarray, np.ndarray]:
        pair_batches = [
            self._draw_pair_batches(seed, round_index, *pair)
            for pair in self._pairs_of_work_item(work_id)
        ]
        indices = np.stack([i for i, _ in pair_batches], 1)  # [steps, classes of the unit, B]
        sizes = np.array([size for _, size in pair_batches], np.int32)
        return indices.reshape(-1, self.batch_size), np.tile(sizes, self._condensation.steps)

    def count_full_pass_batches(self, num_blocks: int) -> int:
        """Batches of each block that hold the examples of all clients: every round's, at most."""
        return -(-len(self._partition.indices) // (num_blocks * self.batch_size))

    def fill_full_pass(self, examples: np.ndarray, pairs: np.ndarray, clients: np.ndarray) -> None:
        """Write all examples of these clients, and their pairs, to `[D, M, B]` each.

        Batch after batch, one to each block in turn; what is left over is padding.
        """
        sorted_clients = np.sort(clients)
        example_ids = np.concatenate([self._client_examples(k) for k in sorted_clients])
        client_ids = np.repeat(sorted_clients, self._partition.sizes[sorted_clients])
        padding_id = self._partition.num_clients * self._num_classes
        num_blocks, num_batches, size = pairs.shape
        for out, values, padding in (
            (examples, example_ids, 0),
            (pairs, client_ids * self._num_classes + self._labels[example_ids], padding_id),
        ):
            flat = np.full(out.size, padding, out.dtype)
            flat[: len(example_ids)] = values
            out[...] = flat.reshape(num_batches, num_blocks, size).swapaxes(0, 1)

    def _pairs_of_work_item(self, unit: int) -> list[tuple[int, int]]:
        if self._condensation.is_per_client:
            return [(unit, int(label)) for label in np.flatnonzero(self._has_pair[unit])]
        return [divmod(unit, self._num_classes)]

    def _class_examples(self, client: int, label: int) -> np.ndarray:
        held = self._client_examples(client)
        return held[self._labels[held] == label]

    def _client_examples(self, client: int) -> np.ndarray:
        offsets = self._partition.offsets
        return self._partition.indices[offsets[client] : offsets[client + 1]]

    def _make_rng(self, seed: int, round_index: int, client: int, label: int, use: int):
        pair = client * self._num_classes + label
        return make_host_rng(seed, Stream.BATCHES, round_index, pair, use)

    def _draw_pair_batches(self, seed: int, round_index: int, client: int, label: int):
        """A pair's batches `[steps, B]`, and how many entries of each count."""
        held, size = self._class_examples(client, label), self.batch_size
        rng, steps = self._make_rng(seed, round_index, client, label, 0), self._condensation.steps
        if len(held) > size:
            out = np.empty((steps, size), np.int32)
            for first in range(0, steps, 100):
                some = out[first : first + 100]
                order = rng.random((len(some), len(held)), dtype=np.float32)
                some[...] = held[np.argpartition(order, size, axis=1)[:, :size]]
            return out, size
        if self._condensation.repeats_examples:
            again = held[rng.integers(0, len(held), (steps, size - len(held)))]
            return np.hstack([np.tile(held, (steps, 1)), again]).astype(np.int32), size
        return np.tile(np.resize(held, size), (steps, 1)).astype(np.int32), len(held)
