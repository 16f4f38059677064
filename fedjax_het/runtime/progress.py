"""Progress of long work on standard error: an area of a terminal, a line now and then in a pipe,
or JSON objects, see `utils.console`."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fedjax_het.utils import console
from fedjax_het.utils.text import to_one_line

# Seconds between lines where there is no terminal: a twentieth of those gone, within these.
MIN_LINE_SECONDS, MAX_LINE_SECONDS = 30.0, 600.0
JSON_SECONDS = 1.0  # between objects of one phase


class Progress(NamedTuple):
    """Where runs stand; handed to the `progress` callable between calls of their programs."""

    phase: str  # "rounds" or the name of work between rounds
    done: int
    total: int
    rate: float  # rounds (or iterations) per second since this start, of each run
    samples_per_second: float  # client samples of all runs; 0 outside rounds
    seconds_to_go: float
    accuracy: float = math.nan  # the latest measured, mean over the runs


ProgressCallback = Callable[[Progress], None]


@contextlib.contextmanager
def show_progress(
    title: str, *, quiet: bool = False, transient: bool = False, initial_phase: str = "compiling"
) -> Iterator[ProgressCallback | None]:
    """Yields a `progress` callable for `simulate`; None when quiet.

    What is `transient` is one of many: of it nothing stays on a terminal, and a pipe sees a line only
    if it takes long. first: what goes on before the first call.
    """
    title, mode = to_one_line(title), console.output_mode()
    if quiet or mode == console.QUIET:
        yield None
    elif mode == console.JSON:
        yield _build_json_logger(title)
    elif sys.stderr.isatty():
        from fedjax_het.runtime.progress_panel import show_panel

        with show_panel(title, transient, initial_phase=initial_phase) as show:
            yield show
    else:
        yield _build_line_printer(title, transient)


def format_progress_parts(progress: Progress) -> dict[str, str]:
    """What there is to say, by its kind, the most important first: accuracy, time to go, rate,
    client samples."""
    unit = "rounds" if progress.phase == "rounds" else "iterations"
    parts = {}
    if math.isfinite(progress.accuracy):
        parts["accuracy"] = f"accuracy {100 * progress.accuracy:.1f} %"
    parts["to go"] = f"{format_duration(progress.seconds_to_go)} to go"
    parts["rate"] = f"{progress.rate:.3g} {unit}/s"
    if progress.samples_per_second:
        parts["samples"] = f"{progress.samples_per_second:,.0f} client samples/s"
    return parts


def format_progress(progress: Progress) -> str:
    """The latest accuracy, time to go and rates, in one line."""
    return ", ".join(format_progress_parts(progress).values())


def _build_line_printer(title: str, transient: bool) -> ProgressCallback:
    start_time = time.monotonic()
    last_time = start_time if transient else -math.inf

    def show(progress: Progress) -> None:
        nonlocal last_time
        now = time.monotonic()
        is_last_line = not transient and progress.done >= progress.total
        if (
            now - last_time < min(max(MIN_LINE_SECONDS, (now - start_time) / 20), MAX_LINE_SECONDS)
            and not is_last_line
        ):
            return
        last_time = now
        position = f"{progress.phase} {progress.done}/{progress.total}"
        print(f"{title}: {position}, {format_progress(progress)}", file=sys.stderr, flush=True)

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
    """A duration in words: `8.3 s`, `2:05`, `1:10:00`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
