"""Progress of long work on standard error.

A terminal shows a panel below all other output, and a notebook shows a bar below the cell. A pipe
gets a line now and then. The output mode of the process, see `utils.console`, may ask for JSON
objects or for nothing.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import rich.progress
from rich.console import Console, RenderableType
from rich.table import Column
from rich.text import Text

from fedjax_het.utils import console
from fedjax_het.utils.env import is_terminal
from fedjax_het.utils.text import escape_html, to_one_line

START, END = "start", "end"
"""Phases before the first round and after the last."""
MIN_LINE_SECONDS, MAX_LINE_SECONDS = 30.0, 600.0
"""Limits of the seconds between lines in a pipe, which are a twentieth of the elapsed time."""
JSON_SECONDS = 1.0
"""Seconds between JSON objects of one phase."""
NOTEBOOK_SECONDS = 0.2
"""Seconds between updates of the bar in a notebook."""
BAR_WIDTH, NARROW_BAR_WIDTH = 24, 10
"""Width of a bar, and of a bar on a terminal of less than `MIN_WIDTH`, in columns of text."""
MIN_WIDTH, MIN_WIDTH_WITH_BAR = 120, 80
"""Widths of the narrowest terminals with a whole line and with bars, in columns of text."""
_ELAPSED_WIDTH = 9  # of the elapsed time between two spaces


class Progress(NamedTuple):
    """Progress of runs, as the `progress` callable receives it between calls of programs."""

    phase: str
    """"rounds", or the name of work between rounds."""
    done: int
    """Rounds or iterations that are done."""
    total: int
    """Rounds or iterations of the phase."""
    rate: float
    """Rounds or iterations per second of each run since this start."""
    samples_per_second: float
    """Client samples per second of all runs; 0 outside rounds."""
    seconds_to_go: float
    """Expected seconds until the end of the phase."""
    accuracy: float = math.nan
    """Latest measured accuracy, averaged over the runs; NaN before the first."""
    accuracy_name: str = "accuracy"
    """"accuracy" on tests, or "validation accuracy" for runs with validation examples; with the
    evaluated models in words if clients have tests."""


ProgressCallback = Callable[[Progress], None]
ProgressOption = ProgressCallback | Literal["auto"] | bool | None
"""Progress of a run: a callable, "auto" or True for `show_progress`, None or False for nothing."""
SweepProgressOption = Callable[[str], None] | Literal["auto"] | bool | None
"""Progress of a sweep: a function that receives a line per run; "auto" or True prints the lines and
shows the progress of the current runs on standard error; None or False for nothing."""
# Panels of several threads would overwrite each other: the first panel of the process is shown.
_panel_lock = threading.Lock()


@contextlib.contextmanager
def show_selected_progress(
    progress: ProgressOption,
    title: str,
    *,
    transient: bool = False,
    initial_phase: str = "compiling",
) -> Iterator[ProgressCallback | None]:
    """Yield the callable that the `progress` argument of a function selects.

    Args:
      progress: the argument. With "auto", stderr has the progress if it is a terminal or a
        notebook; otherwise a run of more than 30 seconds writes a line now and then.
      title: name of the work.
      transient: leave nothing on a terminal at the end.
      initial_phase: name of the phase before the first call.

    Yields:
      The callable, or None.
    """
    is_hidden = callable(progress) or not progress or jax.process_index() != 0
    if is_hidden or not _panel_lock.acquire(blocking=False):
        yield progress if callable(progress) else None
        return
    try:
        is_lasting = is_terminal(sys.stderr) or find_notebook_display() is not None
        is_transient = transient or not is_lasting
        with show_progress(title, transient=is_transient, initial_phase=initial_phase) as show:
            yield show
    finally:
        _panel_lock.release()


@contextlib.contextmanager
def show_progress(
    title: str, *, quiet: bool = False, transient: bool = False, initial_phase: str = "compiling"
) -> Iterator[ProgressCallback | None]:
    """Yield a `progress` callable for `simulate`.

    Args:
      title: name of the work.
      quiet: show nothing.
      transient: leave nothing on a terminal or in a notebook at the end, and write a line to a
        pipe only if the work takes long. It is meant for one of many pieces of work.
      initial_phase: name of the phase before the first call.

    Yields:
      The callable; None if the process is quiet.

    Example:
      >>> from fedjax_het.runtime.progress import Progress, show_progress
      >>> with show_progress("FedAvg on digits", quiet=True) as show:
      ...     print(show)
      None
    """
    title, mode = to_one_line(title), console.output_mode()
    if quiet or mode == console.QUIET:
        yield None
    elif mode == console.JSON:
        yield _build_json_logger(title)
    elif (display := find_notebook_display()) is not None:
        bar = NotebookBar(display)
        bar.start(title, initial_phase)
        try:
            yield bar
        finally:
            bar.clear() if transient else bar.end()
    elif is_terminal(sys.stderr):
        with show_panel(title, transient, initial_phase=initial_phase) as show:
            yield show
    else:
        yield _build_line_printer(title, transient)


def format_progress(progress: Progress) -> str:
    """Return phase, accuracy, remaining time and rates in one line, the most important first.

    Example:
      >>> from fedjax_het.runtime.progress import Progress, format_progress
      >>> format_progress(Progress("rounds", 30, 300, 3.2, 1250.0, 84.4, 0.8123))
      'rounds 30/300, accuracy 81.2 %, 1:24 to go, 3.2 rounds/s, 1,250 client samples/s'
    """
    parts = [f"{progress.phase} {progress.done}/{progress.total}"]
    if math.isfinite(progress.accuracy):
        parts.append(f"{progress.accuracy_name} {100 * progress.accuracy:.1f} %")
    unit = "rounds" if progress.phase == "rounds" else "iterations"
    parts.append(f"{format_duration(progress.seconds_to_go)} to go")
    parts.append(f"{progress.rate:.3g} {unit}/s")
    if progress.samples_per_second:
        parts.append(f"{progress.samples_per_second:,.0f} client samples/s")
    return ", ".join(parts)


def find_notebook_display() -> Callable[..., Any] | None:
    """Return the function `display` of a notebook's kernel; None in terminals and scripts."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return display


class NotebookBar:
    """A bar below the cell of a notebook, which every call updates."""

    def __init__(self, display: Callable[..., Any]):
        """Show an empty output.

        Args:
          display: function of the notebook's kernel, see `find_notebook_display`.
        """
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def start(self, title: str, phase: str = "compiling") -> None:
        """Show a bar without a length.

        Args:
          title: name of the work.
          phase: name of the phase before the first call.
        """
        self._title, self._phase = title, phase
        self._start_time, self._last_time = time.monotonic(), -math.inf
        self.write(f"{title}: {phase}", "<progress></progress>")

    def __call__(self, progress: Progress) -> None:
        """Show the bar of a phase, unless the last update was less than 0.2 s before."""
        text, now = format_progress(progress), time.monotonic()
        self._phase = text.split(", ")[0]
        if now - self._last_time >= NOTEBOOK_SECONDS:
            self._last_time = now
            bar = f"<progress value='{progress.done}' max='{progress.total}'></progress>"
            self.write(f"{self._title}: {text}", bar)

    def write(self, text: str, bar: str = "") -> None:
        """Replace the output by a text, after HTML of a bar.

        Args:
          text: one line.
          bar: HTML of the bar (default: no bar).
        """
        html = f"{bar}<span style='font-family:monospace'> {escape_html(text)}</span>"
        self._handle.update({"text/html": html, "text/plain": text}, raw=True)

    def end(self) -> None:
        """Replace the bar by a line with the last phase and the elapsed time."""
        elapsed = format_duration(time.monotonic() - self._start_time)
        self.write(f"{self._title}: {self._phase}, {elapsed}")

    def clear(self) -> None:
        """Leave nothing in the output."""
        self._handle.update({"text/html": "", "text/plain": ""}, raw=True)


def _build_line_printer(title: str, transient: bool) -> ProgressCallback:
    start_time = time.monotonic()
    last_time = start_time if transient else -math.inf

    def show(progress: Progress) -> None:
        nonlocal last_time
        now = time.monotonic()
        is_last_line = not transient and progress.done >= progress.total
        interval = min(max(MIN_LINE_SECONDS, (now - start_time) / 20), MAX_LINE_SECONDS)
        if is_last_line or now - last_time >= interval:
            last_time = now
            print(f"{title}: {format_progress(progress)}", file=sys.stderr, flush=True)

    return show


def _build_json_logger(title: str) -> ProgressCallback:
    last_times: dict[str, float] = {}

    def show(progress: Progress) -> None:
        now = time.monotonic()
        is_due = now - last_times.get(progress.phase, -math.inf) >= JSON_SECONDS
        if is_due or progress.done >= progress.total:
            last_times[progress.phase] = now
            console.log_event("progress", title=title, **progress._asdict())

    return show


def format_duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
      >>> from fedjax_het.runtime.progress import format_duration
      >>> [format_duration(seconds) for seconds in (8.3, 125, 4200, float("inf"))]
      ['8.3 s', '2:05', '1:10:00', '?']
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@contextlib.contextmanager
def show_panel(
    title: str, transient: bool, console: Console | None = None, *, initial_phase: str = "compiling"
) -> Iterator[ProgressCallback]:
    """Show a title, and a line for the rounds and for a long phase within a round.

    Text that is printed, logged or warned of meanwhile appears above the panel.

    Args:
      title: name of the work.
      transient: remove the panel at the end.
      console: the terminal (default: standard error).
      initial_phase: name of the phase before the first call.

    Yields:
      A `progress` callable for `simulate`.
    """
    console = console or Console(stderr=True, highlight=False)
    bar_width = BAR_WIDTH if console.width >= MIN_WIDTH else NARROW_BAR_WIDTH
    bar = [rich.progress.BarColumn(bar_width)] * (console.width >= MIN_WIDTH_WITH_BAR)
    # A text that is too long for its column continues on further lines.
    text = rich.progress.TextColumn("{task.description}", markup=False, table_column=Column())
    panel = _Panel(
        *bar,
        rich.progress.TimeElapsedColumn(),
        text,
        console=console,
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),  # a pipe in place of it keeps its own text
    )
    panel.title = Text(title)
    panel.text_width = console.width - _ELAPSED_WIDTH - bar_width * len(bar)
    panel.phase_tasks = {"": panel.add_task(initial_phase, total=None)}
    with panel:
        yield panel.show


class _Panel(rich.progress.Progress):
    title = Text()
    text_width = 0
    phase_tasks: dict[str, rich.progress.TaskID]

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from (self.title, self.make_tasks_table(self.tasks))

    def show(self, progress: Progress) -> None:
        for phase in self.phase_tasks.keys() - {"rounds", progress.phase}:
            self.remove_task(self.phase_tasks.pop(phase))
        if progress.phase not in self.phase_tasks:
            self.phase_tasks[progress.phase] = self.add_task("")
        text = format_progress(progress)
        if len(text) > self.text_width:
            text = format_progress(progress._replace(samples_per_second=0))
        self.update(
            self.phase_tasks[progress.phase],
            completed=progress.done,
            total=progress.total,
            description=text,
        )
