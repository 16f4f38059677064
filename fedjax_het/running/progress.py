"""Progress of long work on the terminal: a bar that a pipe sees as a few plain lines."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator

PLAIN_SECONDS = 15.0  # between lines where there is no terminal


@contextlib.contextmanager
def progress_line(
    title: str, *, quiet: bool = False, passing: bool = False
) -> Iterator[Callable | None]:
    """Yields a `progress` callable for `simulate`, writing to stderr; None when quiet.

    What is `passing` is one of many: its bar goes when it is done, and a pipe sees a line only if
    it takes long.
    """
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(title, passing) as show:
            yield show
    else:
        yield _plain(title, passing)


def describe(p) -> str:
    """Rates, time to go and the latest accuracy of a `Progress`, in one line."""
    unit = "rounds" if p.phase == "rounds" else "iterations"
    parts = [f"{p.rate:.3g} {unit}/s"]
    if p.samples_per_second:
        parts.append(f"{p.samples_per_second:,.0f} client samples/s")
    parts.append(f"{clock(p.seconds_to_go)} to go")
    if math.isfinite(p.accuracy):
        parts.append(f"accuracy {100 * p.accuracy:.1f} %")
    return ", ".join(parts)


def _plain(title: str, passing: bool) -> Callable:
    last = time.monotonic() if passing else -math.inf

    def show(p) -> None:
        nonlocal last
        told = passing or p.done < p.total  # else the last line is due
        if time.monotonic() - last < PLAIN_SECONDS and told:
            return
        last = time.monotonic()
        print(f"{title}: {p.phase} {p.done}/{p.total}, {describe(p)}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def _bar(title: str, passing: bool) -> Iterator[Callable]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=passing) as bars:
        tasks: dict[str, int] = {}
        opening = bars.add_task(f"{title}: compiling", total=None, detail="")

        def show(p) -> None:
            bars.update(opening, visible=False)
            if p.phase not in tasks:
                tasks[p.phase] = bars.add_task(f"{title}: {p.phase}", total=p.total, detail="")
            bars.update(tasks[p.phase], completed=p.done, detail=describe(p))

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
