"""Tells trackers about runs: a callback."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_het.common.text import one_line
from fedjax_het.running.trackers import TRACKERS, require_trackers
from fedjax_het.running.trackers.contract import Opening, Record
from fedjax_het.running.watching import END, START, Callback, Standing

log = logging.getLogger("fedjax_het")


def with_trackers(
    callbacks: Sequence[Callback],
    track: Sequence[str],
    folder: Path | None,
    *,
    argument: str = "output_dir",
) -> list[Callback]:
    """The callbacks, after one for the trackers named. Raises ConfigError for trackers that are
    unknown or lack a package, and without a folder, which is the `argument` of that name."""
    require_trackers(track, folder, argument=argument)
    if folder is None or not track:
        return list(callbacks)
    return [Tracking(track, folder), *callbacks]


class Tracking:
    """Keeps a record of every run in every tracker named.

    A tracker that fails is left alone from then on, with a line in the log: the run is worth more
    than its record.
    """

    def __init__(self, track: Sequence[str], folder: Path):
        self._folder = folder
        self._opens = {name: TRACKERS[name].open for name in track}
        self._records: dict[tuple[str, str], Record] = {}  # by tracker and run
        self._failed: set[str] = set()

    def __call__(self, now: Standing) -> None:
        if jax.process_index() != 0:
            return
        for name in self._opens.keys() - self._failed:
            try:
                self._tell(name, now)
            except Exception as error:  # of programs, networks and disks that are not ours
                self._failed.add(name)
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                text = f"track = {name!r}: cannot be written ({why}): runs go on without"
                log.warning("%s", one_line(text))

    def _tell(self, name: str, now: Standing) -> None:
        key = name, now.name
        record = self._records.get(key)
        if record is None:  # else it goes on where it waited
            if now.phase != START:
                return
            record = self._records[key] = self._opens[name](self._opening(now))
        curves = {metric: curve for metric, curve in now.metrics.items() if curve.ndim == 1}
        for at in range(record.done, now.done):
            values = {metric: float(curve[at]) for metric, curve in curves.items()}
            record.log(at + 1, {metric: v for metric, v in values.items() if math.isfinite(v)})
        record.done = max(record.done, now.done)
        record.flush()
        if now.phase == END:
            assert now.result is not None
            record.close(_plain(now.result.summary))
            del self._records[key]

    def _opening(self, now: Standing) -> Opening:
        metrics = tuple(name for name, curve in now.metrics.items() if curve.ndim == 1)
        return Opening(self._folder, now.name, _plain(now.spec.to_dict()), metrics, now.done)


def _plain(values: dict[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """By name, in words where it is no number; without what says nothing."""
    plain: dict[str, str | int | float | bool] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            plain |= _plain(value, f"{prefix}{name}.")
        elif value is not None:
            value = value.item() if isinstance(value, np.generic) else value
            kept = isinstance(value, str | int | float | bool)
            plain[prefix + name] = value if kept else str(value)
    return plain
