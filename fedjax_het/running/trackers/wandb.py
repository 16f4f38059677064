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

from fedjax_het.common.files import write_atomically
from fedjax_het.running.trackers.contract import Opening, Tracker

PROJECT = "fedjax_het"


class WandbRun:
    """`wandb/<name>.json` says under which id. One that had not ended is gone on with: online from
    the round after those that are there; offline, where a kill may have lost what was not written
    yet, from the first, in place of what was kept."""

    open: "dict[str, WandbRun]" = {}  # noqa: RUF012  by id: an error leaves it open, and it is once

    _last: int  # the last round that it was told

    def __init__(self, opening: Opening):
        import wandb

        folder = opening.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{opening.name}.json"
        self._last = 0
        self._id = _left(self._path) or f"{opening.name}-{secrets.token_hex(4)}"
        if (same := self.open.get(self._id)) is not None:
            self._run: Any = same._run
            self.done = self._last = same._last
        else:
            self._run = wandb.init(
                project=PROJECT,
                id=self._id,
                name=opening.name,
                dir=str(opening.folder),
                config=dict(opening.settings),
                resume="allow",
                reinit="create_new",  # runs of a sweep go side by side
            )
            self.done = self._last = max(self._run.starting_step - 1, 0)
            if self._run.offline:
                for part in folder.glob(f"offline-run-*-{self._id}"):
                    if part != Path(self._run.dir).parent:
                        shutil.rmtree(part)
        self.open[self._id] = self
        self._note(ended=False)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round, commit=True)
        self._last = round

    def flush(self) -> None:
        """Its own service writes, and sends, when it sees fit."""

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()
        self.open.pop(self._id, None)
        self._note(ended=True)

    def _note(self, *, ended: bool) -> None:
        text = json.dumps({"id": self._id, "ended": ended}).encode()
        write_atomically(self._path, lambda file: file.write(text))


def _left(path: Path) -> str | None:
    """The id of a run that has not ended."""
    try:
        kept = json.loads(path.read_text())
        return None if kept["ended"] else str(kept["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


TRACKER = Tracker("wandb", "Weights & Biases, online and offline", WandbRun, packages=("wandb",))
