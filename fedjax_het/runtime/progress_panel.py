"""The progress area of a terminal: two lines that stay below whatever else is printed."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from fedjax_het.runtime.progress import (
    Progress,
    ProgressCallback,
    format_duration,
    format_progress_parts,
)

BAR_WIDTH = 24  # cells of a bar; where so many are not free, there is none
GAP = "  "


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
