"""Weights & Biases: a run of the project fedjax_het for every run; offline where its own settings
say so (WANDB_MODE=offline).

`wandb sync results/wandb/offline-run-*` sends on what was kept offline.
"""

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_het.runtime.trackers.base import TrackedRun, Tracker
from fedjax_het.utils.io import write_atomically

PROJECT = "fedjax_het"


class WandbTracker:
    """`wandb/<name>.json` says under which id. One that had not ended is gone on with: online from
    the round after those that are there; offline, where a kill may have lost what was not written
    yet, from the first, in place of what was kept."""

    open_runs: "dict[str, WandbTracker]" = {}  # noqa: RUF012  by id: an error leaves it open, and it is once

    _last_round: int  # the last round that it was told

    def __init__(self, run_info: TrackedRun):
        import wandb

        folder = run_info.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{run_info.digest}.json"
        self._last_round = 0
        self._id = _read_unfinished_id(self._path) or f"{run_info.digest}-{secrets.token_hex(4)}"
        if (existing := self.open_runs.get(self._id)) is not None:
            self._run: Any = existing._run
            self.done = self._last_round = existing._last_round
        else:
            self._run = wandb.init(
                project=PROJECT,
                id=self._id,
                name=run_info.digest,
                dir=str(run_info.folder),
                config=dict(run_info.settings),
                resume="allow",
                reinit="create_new",  # runs of a sweep go side by side
            )
            self.done = self._last_round = max(self._run.starting_step - 1, 0)
            if self._run.offline:
                for part in folder.glob(f"offline-run-*-{self._id}"):
                    if part != Path(self._run.dir).parent:
                        shutil.rmtree(part)
        self.open_runs[self._id] = self
        self._write_state(ended=False)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round, commit=True)
        self._last_round = round

    def flush(self) -> None:
        """Its own service writes, and sends, when it sees fit."""

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()
        self.open_runs.pop(self._id, None)
        self._write_state(ended=True)

    def _write_state(self, *, ended: bool) -> None:
        text = json.dumps({"id": self._id, "ended": ended}).encode()
        write_atomically(self._path, lambda file: file.write(text))


def _read_unfinished_id(path: Path) -> str | None:
    """The id of a run that has not ended."""
    try:
        state = json.loads(path.read_text())
        return None if state["ended"] else str(state["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


TRACKER = Tracker(
    "wandb", "Weights & Biases, online and offline", WandbTracker, packages=("wandb",)
)
