"""Tells trackers about runs: a callback."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_het.runtime.callbacks import END, START, Callback, RunStatus
from fedjax_het.runtime.trackers import TRACKERS, require_trackers
from fedjax_het.runtime.trackers.base import RunTracker, TrackedRun
from fedjax_het.utils.text import to_one_line

log = logging.getLogger("fedjax_het")


def add_tracker_callback(
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
    return [TrackerCallback(track, folder), *callbacks]


class TrackerCallback:
    """Keeps a record of every run in every tracker named.

    A tracker that fails is left alone from then on, with a line in the log: the run is worth more
    than its record.
    """

    def __init__(self, track: Sequence[str], folder: Path):
        self._folder = folder
        self._tracker_factories = {name: TRACKERS[name].open for name in track}
        self._run_trackers: dict[tuple[str, str], RunTracker] = {}  # by tracker and run
        self._failed: set[str] = set()

    def __call__(self, status: RunStatus) -> None:
        if jax.process_index() != 0:
            return
        for name in self._tracker_factories.keys() - self._failed:
            try:
                self._update_tracker(name, status)
            except Exception as error:  # of programs, networks and disks that are not ours
                self._failed.add(name)
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                text = f"track = {name!r}: cannot be written ({reason}): runs go on without"
                log.warning("%s", to_one_line(text))

    def _update_tracker(self, name: str, status: RunStatus) -> None:
        key = name, status.digest
        run_tracker = self._run_trackers.get(key)
        if run_tracker is None:  # else it goes on where it waited
            if status.phase != START:
                return
            run_tracker = self._run_trackers[key] = self._tracker_factories[name](
                self._build_tracked_run(status)
            )
        curves = {metric: curve for metric, curve in status.metrics.items() if curve.ndim == 1}
        for round_index in range(run_tracker.done, status.done):
            values = {metric: float(curve[round_index]) for metric, curve in curves.items()}
            run_tracker.log(
                round_index + 1, {metric: v for metric, v in values.items() if math.isfinite(v)}
            )
        run_tracker.done = max(run_tracker.done, status.done)
        run_tracker.flush()
        if status.phase == END:
            assert status.result is not None
            run_tracker.close(_flatten_values(status.result.summary))
            del self._run_trackers[key]

    def _build_tracked_run(self, status: RunStatus) -> TrackedRun:
        metrics = tuple(name for name, curve in status.metrics.items() if curve.ndim == 1)
        return TrackedRun(
            self._folder,
            status.digest,
            _flatten_values(status.spec.to_dict()),
            metrics,
            status.done,
        )


def _flatten_values(
    values: dict[str, Any], prefix: str = ""
) -> dict[str, str | int | float | bool]:
    """By name, in words where it is no number; without what says nothing."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten_values(value, f"{prefix}{name}.")
        elif value is not None:
            value = value.item() if isinstance(value, np.generic) else value
            is_scalar = isinstance(value, str | int | float | bool)
            flat[prefix + name] = value if is_scalar else str(value)
    return flat
