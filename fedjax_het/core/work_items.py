"""The work of clients in a round: minibatches of clients that train, or that condense their data.

A work item is a sequence of minibatch steps that starts from the server's message. Local training
has one work item per client. Condensation has one per pair of a client and a class; missing pairs
cost nothing. If the classes of a client are coupled, it has one per client.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_het.core.rng import Stream, iter_host_rngs, make_host_rng
from fedjax_het.data import Partition
from fedjax_het.utils.errors import require


class Workload(NamedTuple):
    """Work of all clients in a round, int64 `[K]` each."""

    num_steps: np.ndarray
    "Minibatches, with the passes of the method that measure the data."
    epoch_steps: np.ndarray
    "Minibatches of one epoch."
    fixed_steps: np.ndarray
    "Minibatches of passes that every client makes in full."
    num_classes: np.ndarray
    "Classes that the client condenses."
    sizes: np.ndarray | None = None
    "Examples of each client in the round; None: all of its examples."


def find_present(all_sizes: np.ndarray, sizes: np.ndarray | None) -> np.ndarray:
    """Return whether each client is present in a round: a drift makes clients absent.

    Clients that never have examples are present, so that a drift without absent clients changes no
    draw of clients.

    Args:
      all_sizes: training examples of each client over the run, int64 `[K]`.
      sizes: examples of each client in the round, int64 `[K]`; None: `all_sizes`.

    Returns:
      Whether each client is present, bool `[K]`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.core.work_items import find_present
      >>> find_present(np.array([0, 5, 5]), np.array([0, 0, 3])).tolist()
      [True, False, True]
    """
    if sizes is None:
        return np.ones(len(all_sizes), bool)
    return (sizes > 0) | (all_sizes == 0)


class ClientWork:
    """Clients that go through their data in several passes, each with a separate shuffle.

    The last, smaller batch of a pass is kept.

    Args:
      partition: training examples of each client.
      num_passes: passes over a client's data.
      batch_size: examples of a minibatch.
      max_num_steps: upper limit of the number of minibatches; None: no limit.
      extra_batches: minibatches after the passes. Further passes provide them; the last pass may
        be cut off.
      stream: stream of randomness that shuffles.

    Attributes:
      sizes: examples of each work item, `[U]`.
      num_steps: minibatches of each work item in a round, `[U]`.
      num_samples: examples that each work item processes in a round, `[U]`.
      num_pairs: pairs of client and class that each work item condenses, `[U]`; 0 here.
      epoch_steps: minibatches of one pass over the examples of each work item, at least 1, `[U]`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.core.work_items import ClientWork
      >>> from fedjax_het.data import partition_from_clients
      >>> work = ClientWork(partition_from_clients([[0, 1, 2], [3]]), num_passes=2, batch_size=2)
      >>> work.num_steps.tolist()
      [4, 2]
      >>> batches, sizes = work.draw_batches(0, 0, np.array([0]))
      >>> batches.shape, sizes.tolist()
      ((4, 2), [2, 1, 2, 1])
    """

    num_init_examples = 0

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
        self.partition, self.batch_size, self._stream = partition, batch_size, stream
        self.sizes = sizes = partition.sizes
        per_pass = -(-sizes // batch_size)
        num_steps = num_passes * per_pass + extra_batches * (per_pass > 0)
        per_pass = np.maximum(per_pass, 1)
        self._num_passes = -(-num_steps // per_pass)  # [U] begun in a round
        if max_num_steps is not None:
            num_steps = np.minimum(num_steps, max_num_steps)
        self.num_pairs = np.zeros_like(sizes)
        self.epoch_steps = per_pass
        self._set_num_steps(num_steps)

    def _set_num_steps(self, num_steps: np.ndarray) -> None:
        """Set the minibatches of each work item, and the samples that they contain."""
        self.num_steps = num_steps
        # Whole passes, and full batches of the last one.
        num_full_passes, num_rest = np.divmod(num_steps, self.epoch_steps)
        self.num_samples = num_full_passes * self.sizes + num_rest * self.batch_size

    def of_round(self, round_index: int) -> "ClientWork":
        """Return the work of a round, which is equal in all rounds."""
        return self

    def with_num_steps(self, clients: np.ndarray, num_steps: np.ndarray) -> "ClientWork":
        """Return the work with fewer minibatches of some clients, the first ones of a round.

        Args:
          clients: the clients, `[n]`.
          num_steps: minibatches of these clients, `[n]`.

        Returns:
          The work. Other clients are unchanged.
        """
        work = copy.copy(self)
        all_steps = self.num_steps.copy()
        all_steps[clients] = num_steps
        work._num_passes = -(-all_steps // self.epoch_steps)
        work._set_num_steps(all_steps)
        return work

    def make_workload(self, extra_passes: int) -> Workload:
        """Return the numbers of minibatches of all clients.

        Args:
          extra_passes: passes in addition to local epochs, which clients make in full.

        Returns:
          The numbers.
        """
        fixed_steps = extra_passes * np.where(self.sizes > 0, self.epoch_steps, 0)
        return Workload(
            self.num_steps, self.epoch_steps, fixed_steps, self.num_pairs, self.partition.sizes
        )

    def work_ids_of_clients(self, clients: np.ndarray) -> np.ndarray:
        """Return the work items of clients, client after client."""
        return clients

    def draw_batches(
        self, seed: int, round_index: int, work_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the minibatches of work items in a round.

        A batch that is not full is filled up with samples of the client. The loss and batch norm
        mask them.

        Args:
          seed: seed of the run.
          round_index: the round, counted from 0.
          work_ids: the work items.

        Returns:
          Indices `[steps, B]` int32 and sizes `[steps]` int32, of one work item after the other.
        """
        sizes, num_passes = self.sizes[work_ids], self._num_passes[work_ids]
        per_pass = -(-sizes // self.batch_size)
        order = self._shuffle_examples(seed, round_index, work_ids)
        # A pass begins where the last one ended: in `order`, in padded entries, and in batches.
        pass_sizes, pass_batches = np.repeat(sizes, num_passes), np.repeat(per_pass, num_passes)
        padded_sizes = pass_batches * self.batch_size
        first = np.repeat(pass_sizes.cumsum() - pass_sizes, padded_sizes)
        offsets = concatenate_aranges(padded_sizes) % np.repeat(pass_sizes, padded_sizes)
        batches = order[first + offsets].astype(np.int32).reshape(-1, self.batch_size)
        batch_sizes = np.full(pass_batches.sum(), self.batch_size, np.int32)
        remainder = pass_sizes % self.batch_size
        batch_sizes[(pass_batches.cumsum() - 1)[remainder > 0]] = remainder[remainder > 0]
        num_drawn, num_steps = num_passes * per_pass, self.num_steps[work_ids]
        if (num_drawn == num_steps).all():
            return batches, batch_sizes
        is_kept = concatenate_aranges(num_drawn) < np.repeat(num_steps, num_drawn)
        return batches[is_kept], batch_sizes[is_kept]

    def _shuffle_examples(self, seed: int, round_index: int, work_ids: np.ndarray) -> np.ndarray:
        """Return the examples, work item after work item, once for every pass in its own order."""
        sizes, num_passes = self.sizes[work_ids], self._num_passes[work_ids]
        pass_sizes = np.repeat(sizes, num_passes)
        first = np.repeat(self.partition.offsets[work_ids], num_passes)
        order = np.repeat(first, pass_sizes) + concatenate_aranges(pass_sizes)
        order = self.partition.indices[order]
        end = 0
        rngs = iter_host_rngs(seed, self._stream, round_index, work_ids)
        for size, passes, rng in zip(sizes.tolist(), num_passes.tolist(), rngs, strict=True):
            for _ in range(passes):
                end += size
                rng.shuffle(order[end - size : end])
        return order


class DriftingWork:
    """Clients whose active examples change over the rounds.

    Args:
      works: the work of each phase.
      get_phase: `get_phase(round_index) -> phase`, a position in `works`.
      partition: all training examples of each client.

    Attributes:
      num_steps: number of work items, as the length of an array.
    """

    def __init__(
        self,
        works: "Sequence[ClientWork | ClientClassWork]",
        get_phase: Callable[[int], int],
        partition: Partition,
    ):
        first = works[0]
        self.works, self._get_phase, self.partition = works, get_phase, partition
        self.batch_size, self.num_steps = first.batch_size, first.num_steps
        self.num_init_examples = first.num_init_examples

    def of_round(self, round_index: int) -> "ClientWork | ClientClassWork":
        """Return the work of a round."""
        return self.works[self._get_phase(round_index)]


def concatenate_aranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ..., n - 1 for each length n, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


class CondensationWork(NamedTuple):
    """How a method's clients condense data; static."""

    ipc: int
    "Images per class."
    steps: int
    "Steps of condensation, each with a batch of real examples of the class."
    threshold: int
    "Classes of which a client holds fewer examples are dropped."
    init_examples_per_input: int = 0
    "Real examples from which a synthetic example starts; 0 for none."
    repeats_examples: bool = False
    """Whether repeated examples fill up a batch of a class with fewer examples than its size, as in
    FedDM's public code. Otherwise the batch is the whole class."""
    is_per_client: bool = False
    "Whether a work item is a client with all its classes, which take turns in every step."
    needs_full_pass: bool = False
    "Whether a round needs all examples of its clients, by class."


class ClientClassWork:
    """Pairs of a client k and a class c, with the number k * C + c; or clients with all classes.

    It has the attributes of `ClientWork`.

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
        expected = f"at most {max_count}, the most examples of one class that a client holds"
        require(ipc <= max_count, "ipc", ipc, expected)
        require(threshold <= max_count, "threshold", threshold, expected)
        self.partition, self._labels = partition, np.asarray(labels)
        self._condensation, self._num_classes = condensation, num_classes
        self.batch_size = batch_size
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

    def of_round(self, round_index: int) -> "ClientClassWork":
        """Return the work of a round, which is equal in all rounds."""
        return self

    def make_workload(self, extra_passes: int) -> Workload:
        """Return the numbers of minibatches and classes of all clients."""
        num_clients = self.partition.num_clients
        num_steps = self.num_steps.reshape(num_clients, -1).sum(1)
        num_classes = self.num_pairs.reshape(num_clients, -1).sum(1)
        sizes = self.partition.sizes
        return Workload(num_steps, np.ones_like(num_steps), num_steps, num_classes, sizes)

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
          Indices `[n, I]` int32: for each synthetic example different examples, as far as there
          are.
        """
        rows = np.zeros((len(work_ids), self.num_init_examples), np.int32)
        for row, work_id in zip(rows, work_ids.tolist(), strict=True):
            row[...] = self._draw_init_examples(seed, round_index, work_id)
        return rows

    def _draw_init_examples(self, seed: int, round_index: int, work_id: int) -> np.ndarray:
        ipc, num_per_input = self._condensation.ipc, self._condensation.init_examples_per_input
        by_class = np.zeros((self._num_classes, ipc, num_per_input), np.int32)
        for client, label in self._pairs_of_work_item(work_id):
            examples = self._class_examples(client, label)
            rng = self._make_rng(seed, round_index, client, label, 1)
            if num_per_input == 1:
                orders = [rng.permutation(examples) for _ in range(-(-ipc // len(examples)))]
                by_class[label, :, 0] = np.concatenate(orders)[:ipc]
            elif num_per_input:
                is_repeated = len(examples) < num_per_input
                for row in by_class[label]:
                    row[...] = rng.choice(examples, num_per_input, replace=is_repeated)
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
        """Return the batches of each block that hold all clients' examples; 0 if not needed."""
        if not self._condensation.needs_full_pass:
            return 0
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
