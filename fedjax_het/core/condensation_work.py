"""The work of clients that condense data: pairs of a client and a class.

Pairs that do not exist cost nothing. Where the classes of a client are coupled, a work item is a
client with all its classes.
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.data import Partition
from fedjax_het.utils.errors import require


class CondensationWork(NamedTuple):
    """How a method's clients condense data; static."""

    ipc: int
    "Images per class."
    steps: int
    "Steps of condensation, each with a batch of real images of the class."
    threshold: int
    "Classes of which a client holds fewer examples are dropped."
    init_examples_per_image: int = 0
    "Real examples from which a synthetic image starts; 0 for none."
    repeats_examples: bool = False
    """Whether repeated examples fill up a batch of a class with fewer examples than its size, as in
    FedDM's public code; else the batch is the whole class."""
    is_per_client: bool = False
    "Whether a work item is a client with all its classes, which take turns in every step."
    needs_full_pass: bool = False
    "Whether a round needs all examples of its clients, by class."


class ClientClassWork:
    """Pairs of a client k and a class c, with the number k * C + c; or clients with all classes.

    It has the attributes of `core.work_items.ClientWork`.

    Args:
      partition: training examples of each client.
      labels: classes of all training examples, `[N]`.
      num_classes: number of classes, C.
      condensation: how the clients condense data.
      batch_size: examples of a minibatch.

    Raises:
      ConfigError: if no client could fill a class, because `ipc` or the threshold is too large.
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
        ipc, steps, threshold, init_examples, *_ = condensation
        max_count = int(counts.max())
        expected = f"at most {max_count}, the most that a client holds"
        require(ipc <= max_count, "ipc", ipc, expected)
        expected = f"at most {max_count}, the most examples of one class that a client holds"
        require(threshold <= max_count, "threshold", threshold, expected)
        self.partition, self._labels = partition, np.asarray(labels)
        self._condensation, self._num_classes = condensation, num_classes
        self.batch_size, self.needs_full_pass = batch_size, condensation.needs_full_pass
        is_per_client = condensation.is_per_client
        self.num_init_examples = ipc * init_examples * (num_classes if is_per_client else 1)
        self._has_pair = has_pair = counts >= max(1, threshold)  # [K, C]
        num_available = np.maximum(counts, batch_size) if condensation.repeats_examples else counts
        num_samples = steps * np.where(has_pair, np.minimum(num_available, batch_size), 0)

        def per_work_item(pair_values: np.ndarray) -> np.ndarray:
            return pair_values.sum(1) if is_per_client else np.ravel(pair_values)

        self.sizes = per_work_item(np.where(has_pair, counts, 0))
        self.num_samples = per_work_item(num_samples)
        self.num_pairs = per_work_item(has_pair.astype(np.int64))
        self.num_steps = steps * self.num_pairs

    def work_ids_of_clients(self, clients: np.ndarray) -> np.ndarray:
        """Return the work items of clients, client after client."""
        if self._condensation.is_per_client:
            return clients
        return (clients[:, None] * self._num_classes + np.arange(self._num_classes)).reshape(-1)

    def draw_init_examples(self, seed: int, round_index: int, work_ids: np.ndarray) -> np.ndarray:
        """Draw the real examples that each work item starts from.

        Args:
          seed: seed of the run.
          round_index: the round, counted from 0.
          work_ids: the work items.

        Returns:
          Indices `[n, I]` int32: for each image different examples, as far as there are.
        """
        rows = np.zeros((len(work_ids), self.num_init_examples), np.int32)
        for row, work_id in zip(rows, work_ids.tolist(), strict=True):
            row[...] = self._draw_init_examples(seed, round_index, work_id)
        return rows

    def _draw_init_examples(self, seed: int, round_index: int, work_id: int) -> np.ndarray:
        ipc, num_per_image = self._condensation.ipc, self._condensation.init_examples_per_image
        by_class = np.zeros((self._num_classes, ipc, num_per_image), np.int32)
        for client, label in self._pairs_of_work_item(work_id):
            examples = self._class_examples(client, label)
            rng = self._make_rng(seed, round_index, client, label, 1)
            if num_per_image == 1:
                orders = [rng.permutation(examples) for _ in range(-(-ipc // len(examples)))]
                by_class[label, :, 0] = np.concatenate(orders)[:ipc]
            elif num_per_image:
                is_repeated = len(examples) < num_per_image
                for image in by_class[label]:
                    image[...] = rng.choice(examples, num_per_image, replace=is_repeated)
        if self._condensation.is_per_client:
            return by_class.reshape(-1)
        return by_class[work_id % self._num_classes].reshape(-1)

    def draw_batches(
        self, seed: int, round_index: int, work_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the minibatches of work items in a round; the classes of a client take turns.

        Every step draws anew, without replacement.

        Args:
          seed: seed of the run.
          round_index: the round, counted from 0.
          work_ids: the work items.

        Returns:
          Indices `[steps, B]` int32 and sizes `[steps]` int32, of one work item after the other.
        """
        all_indices = [np.zeros((0, self.batch_size), np.int32)]
        all_sizes = [np.zeros(0, np.int32)]
        for work_id in work_ids.tolist():
            pair_batches = [
                self._draw_pair_batches(seed, round_index, *pair)
                for pair in self._pairs_of_work_item(work_id)
            ]
            indices = np.stack([indices for indices, _ in pair_batches], 1)  # [steps, classes, B]
            sizes = np.array([size for _, size in pair_batches], np.int32)
            all_indices.append(indices.reshape(-1, self.batch_size))
            all_sizes.append(np.tile(sizes, self._condensation.steps))
        return np.concatenate(all_indices), np.concatenate(all_sizes)

    def _draw_pair_batches(self, seed: int, round_index: int, client: int, label: int):
        """Return a pair's batches `[steps, B]`, and the number of entries that count."""
        examples, size = self._class_examples(client, label), self.batch_size
        rng, steps = self._make_rng(seed, round_index, client, label, 0), self._condensation.steps
        if len(examples) > size:
            batches = np.empty((steps, size), np.int32)
            for first in range(0, steps, 100):
                part = batches[first : first + 100]
                order = rng.random((len(part), len(examples)), dtype=np.float32)
                part[...] = examples[np.argpartition(order, size, axis=1)[:, :size]]
            return batches, size
        if self._condensation.repeats_examples:
            repeated = examples[rng.integers(0, len(examples), (steps, size - len(examples)))]
            batches = np.hstack([np.tile(examples, (steps, 1)), repeated])
            return batches.astype(np.int32), size
        return np.tile(np.resize(examples, size), (steps, 1)).astype(np.int32), len(examples)

    def count_full_pass_batches(self, num_blocks: int) -> int:
        """Return the batches of each of `num_blocks` blocks that hold all clients' examples."""
        return -(-len(self.partition.indices) // (num_blocks * self.batch_size))

    def fill_full_pass(self, examples: np.ndarray, pairs: np.ndarray, clients: np.ndarray) -> None:
        """Write all examples of clients: batch after batch, one to each block in turn.

        Args:
          examples: output, indices of the examples, `[D, M, B]`; 0 is padding.
          pairs: output, their pairs of client and class, `[D, M, B]`; K * C is padding.
          clients: the clients.
        """
        clients = np.sort(clients)
        example_ids = np.concatenate([self._client_examples(k) for k in clients])
        client_ids = np.repeat(clients, self.partition.sizes[clients])
        pair_ids = client_ids * self._num_classes + self._labels[example_ids]
        padding = self.partition.num_clients * self._num_classes
        num_blocks, num_batches, size = pairs.shape
        for out, values, fill in ((examples, example_ids, 0), (pairs, pair_ids, padding)):
            flat = np.full(out.size, fill, out.dtype)
            flat[: len(values)] = values
            out[...] = flat.reshape(num_batches, num_blocks, size).swapaxes(0, 1)

    def _pairs_of_work_item(self, work_id: int) -> list[tuple[int, int]]:
        if self._condensation.is_per_client:
            return [(work_id, int(label)) for label in np.flatnonzero(self._has_pair[work_id])]
        return [divmod(work_id, self._num_classes)]

    def _class_examples(self, client: int, label: int) -> np.ndarray:
        examples = self._client_examples(client)
        return examples[self._labels[examples] == label]

    def _client_examples(self, client: int) -> np.ndarray:
        return self.partition.client_indices(client)

    def _make_rng(self, seed: int, round_index: int, client: int, label: int, use: int):
        pair = client * self._num_classes + label
        return make_host_rng(seed, Stream.BATCHES, round_index, pair, use)
