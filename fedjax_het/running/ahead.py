"""What calls of the rounds' program read, made by a thread while the devices work."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from fedjax_het.engine.rounds import ChunkInputs
from fedjax_het.running.runs import Runs


class Ahead:
    """The inputs of the next calls, as many as there is room for.

    Two are made ahead, so that a call that takes the devices less time than the host finds one that
    was made during a longer one. What was made for calls that do not come is dropped. Use it as a
    context: its thread ends there, with what it is at. What fails in the thread fails in `take`.
    """

    def __init__(self, runs: Runs):
        self._runs = runs
        self._made: dict[tuple[int, int], Future[ChunkInputs]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fedjax_het-schedules")

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, first: int, count: int) -> ChunkInputs:
        """Those of rounds `first .. first + count - 1`."""
        made = self._made.pop((first, count), None)
        if made is not None:
            return made.result()
        self._drop()
        return self._runs.call(first, count)

    def prepare(self, first: int, count: int) -> None:
        """Make those of the calls from round `first` on, of `count` rounds each."""
        wanted: list[tuple[int, int]] = []
        while first < self._runs.rounds and len(wanted) < self._runs.room.ahead:
            count = min(count, self._runs.rounds - first)
            wanted.append((first, count))
            first += count
        if not self._made.keys() <= set(wanted):
            self._drop()
        for call in wanted:
            if call not in self._made:
                self._made[call] = self._thread.submit(self._runs.call, *call)

    def _drop(self) -> None:
        for made in self._made.values():
            made.cancel()
        self._made.clear()
