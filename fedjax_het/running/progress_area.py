"""The progress area of a terminal: two lines that stay below whatever else is printed."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from fedjax_het.running.progress import Progress, Show, clock, parts_of

BAR = 24  # cells of a bar; where so many are not free, there is none
GAP = "  "


@contextlib.contextmanager
def shown(
    title: str, passing: bool, console: Console | None = None, *, first: str = "compiling"
) -> Iterator[Show]:
    """Yields a `progress` callable. What is printed, logged or warned of in here goes above.

    passing: nothing stays of it. console: default that of standard error. first: what goes on
    before the first call.
    """
    area = _Area(title, first)
    with Live(
        area,
        console=console or Console(stderr=True, highlight=False),
        transient=passing,
        # To the console, which is standard error: what goes to a file or a pipe stays there.
        redirect_stdout=sys.stdout.isatty(),
    ):
        yield area.show


class _Area:
    """A title, and a line for each phase that goes on: the rounds, and what a long round is at."""

    def __init__(self, title: str, first: str):
        self.title, self.first, self.began = title, first, time.monotonic()
        self.at: dict[str, Progress] = {}

    def show(self, progress: Progress) -> None:
        """Where the work stands."""
        rounds = {"rounds": self.at["rounds"]} if "rounds" in self.at else {}
        self.at = {**rounds, progress.phase: progress}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield _line(_shortened(self.title, width))
        if not self.at:
            gone = clock(time.monotonic() - self.began)
            yield _line(_shortened(f"{GAP}{self.first}, {gone}", width))
        for progress in self.at.values():
            yield stand(progress, width)


def stand(progress: Progress, width: int) -> Text:
    """One line of at most `width` cells: the phase, what is done and the accuracy whatever the
    width; the other parts as far as there is room, the least important last."""
    parts = parts_of(progress)
    first = [GAP + progress.phase, f"{progress.done}/{progress.total}"]
    texts = [*first, parts.pop("accuracy")] if "accuracy" in parts else first
    bar = False
    for name, part in parts.items():
        bar = bar or (name == "rate" and _length(texts) + BAR + len(GAP) <= width)
        if _length([*texts, part]) + (BAR + len(GAP) if bar else 0) > width:
            break
        texts.append(part)
    if cell_len(GAP.join(texts)) > width:
        texts[0] = _shortened(texts[0], max(width - _length(texts[1:]) - len(GAP), 1))
    line = _line(texts[0])
    if bar:
        full = min(int(BAR * progress.done / max(progress.total, 1)), BAR)
        line.append(GAP).append("━" * full, "cyan").append("─" * (BAR - full), "dim")
    line.append(GAP + GAP.join(texts[1:]))
    line.truncate(width)
    return line


def _length(texts: list[str]) -> int:
    return cell_len(GAP.join(texts))


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _shortened(text: str, width: int) -> str:
    """At most so many cells: the middle is left out, as what tells runs apart is at both ends."""
    if cell_len(text) <= width:
        return text
    head = (width - 1) // 2
    tail = text[-(width - 1 - head) :] if width - 1 - head else ""
    while cell_len(tail) > width - 1 - head:
        tail = tail[1:]
    return set_cell_size(text, head).rstrip() + "…" + tail.lstrip()
