"""A table of every run: `csv/<name>.csv`, a line per round. Needs nothing."""

import csv
import io
import os
from collections.abc import Mapping

from fedjax_het.runtime.trackers.base import TrackedRun, Tracker
from fedjax_het.utils.io import write_atomically


class CsvTracker:
    """Lines are appended in one write; where a kill has cut the last one, it is written anew."""

    def __init__(self, run_info: TrackedRun):
        folder = run_info.folder / "csv"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{run_info.digest}.csv"
        self._columns = ("round", *run_info.metrics)
        lines = [_format_line(self._columns), *self._read_complete_lines(run_info.done)]
        self.done = len(lines) - 1
        text = "".join(lines).encode()
        write_atomically(self._path, lambda file: file.write(text))
        self._buffer = ""

    def _read_complete_lines(self, done: int) -> list[str]:
        """The whole lines of the rounds before, as far as none is missing."""
        try:
            lines = self._path.read_text().splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            return []
        complete_lines: list[str] = []
        if not lines or lines[0] != _format_line(self._columns):
            return complete_lines
        for number, line in enumerate(lines[1 : done + 1], 1):
            cells = line.rstrip("\n").split(",")
            if not (line.endswith("\n") and len(cells) == len(self._columns)):
                break
            if cells[0] != str(number):
                break
            complete_lines.append(line)
        return complete_lines

    def log(self, round: int, values: Mapping[str, float]) -> None:
        cells = (repr(values[name]) if name in values else "" for name in self._columns[1:])
        self._buffer += _format_line((str(round), *cells))

    def flush(self) -> None:
        with open(self._path, "ab", buffering=0) as file:
            file.write(self._buffer.encode())
            os.fsync(file.fileno())
        self._buffer = ""

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        """Nothing more: the result's own files have the summary."""


def _format_line(cells: tuple[str, ...]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


TRACKER = Tracker("csv", "a table of every run, a line per round", CsvTracker)
