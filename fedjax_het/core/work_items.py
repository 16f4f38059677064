"""The work of clients that train locally: their minibatches in a round.

A work item is a sequence of minibatch steps that starts from the server's message. Local training
has one work item per client; condensation has others, see `core.condensation_work`.
"""

import numpy as np

from fedjax_het.core.rng import Stream, iter_host_rngs
from fedjax_het.data import Partition


class ClientWork:
    """Clients that go through their data in several passes, each with a shuffle of its own.

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
        self.partition, self.batch_size, self._stream = partition, batch_size, stream
        self.sizes = sizes = partition.sizes
        per_pass = -(-sizes // batch_size)
        num_steps = num_passes * per_pass + extra_batches * (per_pass > 0)
        per_pass = np.maximum(per_pass, 1)
        self._num_passes = -(-num_steps // per_pass)  # [U] begun in a round
        if max_num_steps is not None:
            num_steps = np.minimum(num_steps, max_num_steps)
        self.num_steps = num_steps
        # Whole passes, and full batches of the last one.
        num_full_passes, num_rest = np.divmod(num_steps, per_pass)
        self.num_samples = num_full_passes * sizes + num_rest * batch_size
        self.num_pairs = np.zeros_like(sizes)

    def work_ids_of_clients(self, clients: np.ndarray) -> np.ndarray:
        """Return the work items of clients, client after client."""
        return clients

    def draw_init_examples(self, seed: int, round_index: int, work_ids: np.ndarray) -> np.ndarray:
        """Return the examples that each work item starts from: none.

        Args:
          seed: seed of the run.
          round_index: the round, counted from 0.
          work_ids: the work items.

        Returns:
          Indices `[n, 0]` int32.
        """
        return np.zeros((len(work_ids), 0), np.int32)

    def draw_batches(
        self, seed: int, round_index: int, work_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the minibatches of work items in a round.

        A batch that is not full is filled up with samples of the client, which the loss masks: only
        batch-norm statistics can see them.

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


def concatenate_aranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ..., n - 1 for each length n, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
