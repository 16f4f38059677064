"""Weights & Biases: a run of the project fedjax_het for every run; offline where its own
settings say so (WANDB_MODE=offline).

`wandb sync results/wandb/offline-run-*` sends on what was kept offline.
"""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_het.common.files import write_atomically
from fedjax_het.running.trackers.contract import Opening, Tracker

PROJECT = "fedjax_het"
_OPEN: dict[str, Any] = {}  # by id: what raised leaves its run open, and an id is open once


class WandbRun:
    """`wandb/<name>.json` says under which id, and how many rounds were sent: offline nothing else
    knows. A run that had not ended is gone on with, from the round after these."""

    def __init__(self, opening: Opening):
        import wandb

        folder = opening.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{opening.name}.json"
        left = _left(self._path)
        self._id = left["id"] if left else f"{opening.name}-{secrets.token_hex(4)}"
        self.done = left["done"] if left else 0
        self._last = self.done
        self._run = _OPEN.get(self._id) or wandb.init(
            project=PROJECT,
            id=self._id,
            name=opening.name,
            dir=str(opening.folder),
            config=dict(opening.settings),
            resume="allow",
            reinit="create_new",  # runs of a sweep go side by side
        )
        _OPEN[self._id] = self._run

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round, commit=True)
        self._last = max(self._last, round)

    def flush(self) -> None:
        self._note(ended=False)

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()
        _OPEN.pop(self._id, None)
        self._note(ended=True)

    def _note(self, *, ended: bool) -> None:
        text = json.dumps({"id": self._id, "done": self._last, "ended": ended}).encode()
        write_atomically(self._path, lambda file: file.write(text))


def _left(path: Path) -> dict | None:
    """What is known of a run that has not ended."""
    try:
        kept = json.loads(path.read_text())
        known = {"id": str(kept["id"]), "done": int(kept["done"])}
        return None if kept["ended"] else known
    except (OSError, ValueError, KeyError, TypeError):
        return None


TRACKER = Tracker("wandb", "Weights & Biases, online and offline", WandbRun, packages=("wandb",))
