"""Progress of long work on standard error: an area of a terminal, a line now and then in a pipe,
or JSON objects, see `common.manner`."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fedjax_het.common import manner
from fedjax_het.common.text import one_line

# Seconds between lines where there is no terminal: a twentieth of those gone, within these.
SELDOM, SELDOMEST = 30.0, 600.0
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


Show = Callable[[Progress], None]


@contextlib.contextmanager
def progress_line(
    title: str, *, quiet: bool = False, passing: bool = False, first: str = "compiling"
) -> Iterator[Show | None]:
    """Yields a `progress` callable for `simulate`; None when quiet.

    What is `passing` is one of many: of it nothing stays on a terminal, and a pipe sees a line only
    if it takes long. first: what goes on before the first call.
    """
    title, how = one_line(title), manner.manner()
    if quiet or how == manner.QUIET:
        yield None
    elif how == manner.JSON:
        yield _objects(title)
    elif sys.stderr.isatty():
        from fedjax_het.running.progress_area import shown

        with shown(title, passing, first=first) as show:
            yield show
    else:
        yield _plain(title, passing)


def parts_of(progress: Progress) -> dict[str, str]:
    """What there is to say, by its kind, the most important first: accuracy, time to go, rate,
    client samples."""
    unit = "rounds" if progress.phase == "rounds" else "iterations"
    parts = {}
    if math.isfinite(progress.accuracy):
        parts["accuracy"] = f"accuracy {100 * progress.accuracy:.1f} %"
    parts["to go"] = f"{clock(progress.seconds_to_go)} to go"
    parts["rate"] = f"{progress.rate:.3g} {unit}/s"
    if progress.samples_per_second:
        parts["samples"] = f"{progress.samples_per_second:,.0f} client samples/s"
    return parts


def describe(progress: Progress) -> str:
    """The latest accuracy, time to go and rates, in one line."""
    return ", ".join(parts_of(progress).values())


def _plain(title: str, passing: bool) -> Show:
    began = time.monotonic()
    last = began if passing else -math.inf

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        last_line_due = not passing and progress.done >= progress.total
        if now - last < min(max(SELDOM, (now - began) / 20), SELDOMEST) and not last_line_due:
            return
        last = now
        stand = f"{progress.phase} {progress.done}/{progress.total}"
        print(f"{title}: {stand}, {describe(progress)}", file=sys.stderr, flush=True)

    return show


def _objects(title: str) -> Show:
    last: dict[str, float] = {}

    def show(progress: Progress) -> None:
        now = time.monotonic()
        due = now - last.get(progress.phase, -math.inf) >= JSON_SECONDS
        if due or progress.done >= progress.total:
            last[progress.phase] = now
            manner.tell("progress", title=title, **progress._asdict())

    return show


def clock(seconds: float) -> str:
    """A duration in words: `8.3 s`, `2:05`, `1:10:00`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
