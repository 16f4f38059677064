"""A thread that makes the inputs of the next calls of the program while the devices work."""

from concurrent.futures import Future, ThreadPoolExecutor

from fedjax_het.core.round_inputs import ChunkInputs
from fedjax_het.runtime.group_state import GroupState


class InputPrefetcher:
    """Makes the inputs of the next calls of the rounds' program in a thread.

    Two calls are prepared ahead, so that a short call on the devices finds inputs that were made
    during a longer call. Inputs of calls that do not take place are dropped. Use the object as a
    context, which ends the thread. `get` raises an exception of the thread.
    """

    def __init__(self, group_state: GroupState):
        self._group_state = group_state
        self._futures: dict[tuple[int, int], Future[ChunkInputs]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fedjax_het-schedules")

    def __enter__(self) -> "InputPrefetcher":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def get(self, first: int, count: int) -> ChunkInputs:
        """Return the inputs of rounds `first .. first + count - 1`.

        Args:
          first: the first round.
          count: number of rounds.

        Returns:
          The inputs, which are made now if they were not prefetched.
        """
        future = self._futures.pop((first, count), None)
        if future is not None:
            return future.result()
        self._cancel_all()
        return self._group_state.build_chunk_inputs(first, count)

    def prefetch(self, first: int, count: int) -> None:
        """Begin to make the inputs of the calls from round `first` on.

        Args:
          first: the first round.
          count: number of rounds of each call.
        """
        total_rounds = self._group_state.total_rounds
        starts = range(first, total_rounds, count)[: self._group_state.limits.num_prefetch]
        calls = [(start, min(count, total_rounds - start)) for start in starts]
        if not self._futures.keys() <= set(calls):
            self._cancel_all()
        for call in calls:
            if call not in self._futures:
                build = self._group_state.build_chunk_inputs
                self._futures[call] = self._executor.submit(build, *call)

    def _cancel_all(self) -> None:
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()
