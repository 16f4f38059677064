"""What calls of the rounds' program read, made by a thread while the devices work."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from fedjax_het.engine.rounds import ChunkInputs
from fedjax_het.running.runs import GroupState


class InputPrefetcher:
    """The inputs of the next calls, as many as there is room for.

    Two are made ahead, so that a call that takes the devices less time than the host finds one that
    was made during a longer one. What was made for calls that do not come is dropped. Use it as a
    context: its thread ends there, with what it is at. What fails in the thread fails in `take`.
    """

    def __init__(self, group_state: GroupState):
        self._group_state = group_state
        self._futures: dict[tuple[int, int], Future[ChunkInputs]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fedjax_het-schedules")

    def __enter__(self) -> "InputPrefetcher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    def get(self, first: int, count: int) -> ChunkInputs:
        """Those of rounds `first .. first + count - 1`."""
        future = self._futures.pop((first, count), None)
        if future is not None:
            return future.result()
        self._cancel_all()
        return self._group_state.build_chunk_inputs(first, count)

    def prefetch(self, first: int, count: int) -> None:
        """Make those of the calls from round `first` on, of `count` rounds each."""
        calls: list[tuple[int, int]] = []
        while (
            first < self._group_state.total_rounds
            and len(calls) < self._group_state.limits.num_prefetch
        ):
            count = min(count, self._group_state.total_rounds - first)
            calls.append((first, count))
            first += count
        if not self._futures.keys() <= set(calls):
            self._cancel_all()
        for call in calls:
            if call not in self._futures:
                self._futures[call] = self._executor.submit(
                    self._group_state.build_chunk_inputs, *call
                )

    def _cancel_all(self) -> None:
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()
