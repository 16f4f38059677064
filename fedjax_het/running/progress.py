"""Progress of long work on the terminal: a bar that a pipe sees as a few plain lines."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fedjax_het.common.text import one_line

PLAIN_SECONDS = 15.0  # between lines where there is no terminal


class Progress(NamedTuple):
    """Where runs stand; handed to the `progress` callable between calls of their programs."""

    phase: str  # "rounds" or the name of work between rounds
    done: int
    total: int
    rate: float  # rounds (or iterations) per second since this start, of each run
    samples_per_second: float  # client samples of all runs; 0 outside rounds
    seconds_to_go: float
    accuracy: float = math.nan  # the latest measured, mean over the runs


@contextlib.contextmanager
def progress_line(
    title: str, *, quiet: bool = False, passing: bool = False
) -> Iterator[Callable | None]:
    """Yields a `progress` callable for `simulate`, writing to stderr; None when quiet.

    What is `passing` is one of many: its bar goes when it is done, and a pipe sees a line only if
    it takes long.
    """
    title = one_line(title)
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(title, passing) as show:
            yield show
    else:
        yield _plain(title, passing)


def describe(progress: Progress) -> str:
    """Rates, time to go and the latest accuracy, in one line."""
    unit = "rounds" if progress.phase == "rounds" else "iterations"
    parts = [f"{progress.rate:.3g} {unit}/s"]
    if progress.samples_per_second:
        parts.append(f"{progress.samples_per_second:,.0f} client samples/s")
    parts.append(f"{clock(progress.seconds_to_go)} to go")
    if math.isfinite(progress.accuracy):
        parts.append(f"accuracy {100 * progress.accuracy:.1f} %")
    return ", ".join(parts)


def _plain(title: str, passing: bool) -> Callable:
    last = time.monotonic() if passing else -math.inf

    def show(progress: Progress) -> None:
        nonlocal last
        last_line_due = not passing and progress.done >= progress.total
        if time.monotonic() - last < PLAIN_SECONDS and not last_line_due:
            return
        last = time.monotonic()
        stand = f"{progress.phase} {progress.done}/{progress.total}"
        print(f"{title}: {stand}, {describe(progress)}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def _bar(title: str, passing: bool) -> Iterator[Callable]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True), transient=passing) as bars:
        tasks: dict[str, Any] = {}
        opening = bars.add_task(f"{title}: compiling", total=None, detail="")

        def show(progress: Progress) -> None:
            phase = progress.phase
            bars.update(opening, visible=False)
            if phase not in tasks:
                tasks[phase] = bars.add_task(f"{title}: {phase}", total=progress.total, detail="")
            bars.update(tasks[phase], completed=progress.done, detail=describe(progress))

        yield show


def clock(seconds: float) -> str:
    """A duration in words: `8.3 s`, `2:05`, `1:10:00`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
