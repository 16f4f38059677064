"""Signals that wait until work which must not be interrupted has ended."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class _Deferral:
    """Signal handler that records signals while it is active, and calls their own handlers later.

    Attributes:
      handlers: the handlers of the signals by number.
      is_active: whether signals are recorded; otherwise their own handlers are called at once.
    """

    def __init__(self, handlers: dict[int, Callable]):
        self.handlers, self.is_active = handlers, True
        self._frames: dict[int, FrameType | None] = {}  # of the signals that wait

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_active:
            self._frames[number] = frame
        else:
            self.handlers[number](number, frame)

    def deliver(self) -> None:
        """Call the handlers of the signals that wait; each is called even if another raises."""
        if self._frames:
            number, frame = self._frames.popitem()
            try:
                self.handlers[number](number, frame)
            finally:
                self.deliver()


@contextlib.contextmanager
def defer_signals(*, enabled: bool = True) -> Iterator[None]:
    """Call Python's signal handlers, such as Ctrl-C's, after the block instead of within it.

    Python calls signal handlers in the main thread only. In other threads the block is executed
    without a change.

    Args:
      enabled: False to execute the block without a change.

    Yields:
      Nothing.

    Example:
      >>> import signal
      >>> from fedjax_het.utils.signals import defer_signals
      >>> handler = signal.signal(signal.SIGTERM, lambda number, frame: print("terminate"))
      >>> with defer_signals():
      ...     signal.raise_signal(signal.SIGTERM)
      ...     print("the work is done")
      the work is done
      terminate
      >>> _ = signal.signal(signal.SIGTERM, handler)
    """
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield
        return
    current = {number: signal.getsignal(number) for number in signal.valid_signals()}
    deferral = _Deferral({number: h for number, h in current.items() if callable(h)})
    with contextlib.ExitStack() as stack:
        stack.callback(deferral.deliver)
        for number, handler in deferral.handlers.items():
            stack.callback(signal.signal, number, handler)
            signal.signal(number, deferral)
        stack.callback(setattr, deferral, "is_active", False)  # the first callback that is called
        yield
