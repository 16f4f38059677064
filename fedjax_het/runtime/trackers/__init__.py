"""Trackers: programs that keep curves of many runs, a file each.

    simulate(spec, output_dir="results", track=["csv", "tensorboard"])

Every run has a record of its own in every tracker named, under the name of its result's files, in
the output folder: its settings, every round's numbers, and its summary at the end. A run that is
resumed goes on in its record, without a round twice. What a tracker is made of is said in
`runtime.trackers.base`; who tells it about runs is `runtime.trackers.callback`.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fedjax_het.runtime.trackers import csv, mlflow, tensorboard, wandb
from fedjax_het.runtime.trackers.base import OpenTracker, Tracker
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.registry import Registry
from fedjax_het.utils.validation import validate_arguments

__all__ = ["TRACKERS", "Tracker", "register_tracker", "require_trackers"]

TRACKERS: Registry[Tracker] = Registry(
    "tracker", (csv.TRACKER, tensorboard.TRACKER, wandb.TRACKER, mlflow.TRACKER), argument="track"
)


@validate_arguments
def register_tracker(name: str, open: OpenTracker, *, description: str = "") -> None:
    """Make a tracker of the user's own known under a name, as long as this process lasts.

    open: makes the record of a run, or finds the one that it left; see
      `runtime.trackers.base.Tracker`.
    Raises: ConfigError for a name that one of the package's has.
    """
    TRACKERS.add(Tracker(name, description, open))


def require_trackers(
    track: Sequence[str], folder: Path | None, *, argument: str = "output_dir"
) -> None:
    """ConfigError for trackers that are unknown or lack a package, and without a folder."""
    for name in track:
        tracker = TRACKERS.require(name)
        missing = [package for package in tracker.packages if not _is_installed(package)]
        if missing:
            raise ConfigError(
                f"track = {name!r}: expected its packages, but {', '.join(missing)} cannot be "
                f"imported: pip install 'fedjax_het[{name}]'"
            )
    require(not track or folder is not None, "track", list(track), f"an {argument} to write to")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
