"""Interrupts at chosen bytecode instructions of the package's loop over rounds."""

import signal
import sys
from pathlib import Path

import fedjax_het

PACKAGE = Path(fedjax_het.__file__).parent
# The code of a loop over rounds. Other frames run without a trace of their instructions.
LOOP_CODE = ("runtime/", "core/state_paging.py", "core/miscompile_guard.py", "utils/io.py")
SIGNAL_CODE = (*LOOP_CODE, "utils/signals.py")


def send_signal():
    """Send Ctrl-C: its handler is called at the next instruction that allows it."""
    signal.raise_signal(signal.SIGINT)


def raise_error():
    """Raise at once, as no signal does where handlers wait."""
    raise KeyboardInterrupt


class InstructionTracer:
    """Context that counts instructions of the loop, and interrupts at one of them.

    Attributes:
      count: number of instructions so far.
      place: file and line of the interrupt; None before.
    """

    def __init__(self, position=None, interrupt=send_signal):
        self.position, self.interrupt = position, interrupt
        self.count, self.place = 0, None
        names = SIGNAL_CODE if interrupt is send_signal else LOOP_CODE
        self._prefixes = tuple(str(PACKAGE / name) + ("/" * name.endswith("/")) for name in names)

    def __enter__(self):
        self._previous = sys.gettrace()
        sys.settrace(self._trace_call)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(self._previous)

    def _trace_call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self._prefixes):
            return None
        frame.f_trace_opcodes = True
        return self._trace_instruction

    def _trace_instruction(self, frame, event, arg):
        if event == "opcode":
            self.count += 1
            if self.count == self.position:
                path = Path(frame.f_code.co_filename).relative_to(PACKAGE)
                self.place = f"{path}:{frame.f_lineno}"
                self.interrupt()
        return self._trace_instruction
