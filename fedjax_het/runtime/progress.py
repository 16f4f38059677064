"""Progress of long work on standard error, as `utils.console` says.

A terminal has an area of two lines below whatever else is printed, a pipe a line now and then; or
JSON objects are written.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from fedjax_het.utils import console
from fedjax_het.utils.text import to_one_line

# Seconds between lines where there is no terminal: a twentieth of those gone, within these.
MIN_LINE_SECONDS, MAX_LINE_SECONDS = 30.0, 600.0
JSON_SECONDS = 1.0  # between objects of one phase
BAR_WIDTH = 24  # cells of a bar; where so many are not free, there is none
GAP = "  "


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


@contextlib.contextmanager
def show_panel(
    title: str, transient: bool, console: Console | None = None, *, initial_phase: str = "compiling"
) -> Iterator[ProgressCallback]:
    """Yields a `progress` callable. What is printed, logged or warned of in here goes above.

    passing: nothing stays of it. console: default that of standard error. first: what goes on
    before the first call.
    """
    panel = _ProgressPanel(title, initial_phase)
    with Live(
        panel,
        console=console or Console(stderr=True, highlight=False),
        transient=transient,
        # To the console, which is standard error: what goes to a file or a pipe stays there.
        redirect_stdout=sys.stdout.isatty(),
    ):
        yield panel.update


class _ProgressPanel:
    """A title, and a line for each phase that goes on: the rounds, and what a long round is at."""

    def __init__(self, title: str, initial_phase: str):
        self.title, self.initial_phase, self.start_time = title, initial_phase, time.monotonic()
        self.phases: dict[str, Progress] = {}

    def update(self, progress: Progress) -> None:
        """Where the work stands."""
        rounds = {"rounds": self.phases["rounds"]} if "rounds" in self.phases else {}
        self.phases = {**rounds, progress.phase: progress}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield _build_line(_shorten_middle(self.title, width))
        if not self.phases:
            elapsed = format_duration(time.monotonic() - self.start_time)
            yield _build_line(_shorten_middle(f"{GAP}{self.initial_phase}, {elapsed}", width))
        for progress in self.phases.values():
            yield format_phase_line(progress, width)


def format_phase_line(progress: Progress, width: int) -> Text:
    """One line of at most `width` cells: the phase, what is done and the accuracy whatever the
    width; the other parts as far as there is room, the least important last."""
    parts = format_progress_parts(progress)
    leading_texts = [GAP + progress.phase, f"{progress.done}/{progress.total}"]
    texts = [*leading_texts, parts.pop("accuracy")] if "accuracy" in parts else leading_texts
    has_bar = False
    for name, part in parts.items():
        has_bar = has_bar or (
            name == "rate" and _measure_width(texts) + BAR_WIDTH + len(GAP) <= width
        )
        if _measure_width([*texts, part]) + (BAR_WIDTH + len(GAP) if has_bar else 0) > width:
            break
        texts.append(part)
    if cell_len(GAP.join(texts)) > width:
        texts[0] = _shorten_middle(texts[0], max(width - _measure_width(texts[1:]) - len(GAP), 1))
    line = _build_line(texts[0])
    if has_bar:
        num_filled = min(int(BAR_WIDTH * progress.done / max(progress.total, 1)), BAR_WIDTH)
        line.append(GAP).append("━" * num_filled, "cyan").append(
            "─" * (BAR_WIDTH - num_filled), "dim"
        )
    line.append(GAP + GAP.join(texts[1:]))
    line.truncate(width)
    return line


def _measure_width(texts: list[str]) -> int:
    return cell_len(GAP.join(texts))


def _build_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _shorten_middle(text: str, width: int) -> str:
    """At most so many cells: the middle is left out, as what tells runs apart is at both ends."""
    if cell_len(text) <= width:
        return text
    head = (width - 1) // 2
    tail = text[-(width - 1 - head) :] if width - 1 - head else ""
    while cell_len(tail) > width - 1 - head:
        tail = tail[1:]
    return set_cell_size(text, head).rstrip() + "…" + tail.lstrip()
