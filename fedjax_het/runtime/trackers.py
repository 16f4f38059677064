"""Trackers: programs that store curves of many runs, one record per run.

    simulate(spec, output_dir="results", track=["csv", "tensorboard"])

Every run has a record in every tracker that `track` names: its settings, the metrics of every round
and its summary. The record is in the output folder, under the digest of the run's result. A resumed
run continues its record without repeating a round.
"""

import csv
import io
import itertools
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_het.runtime.callbacks import Callback, RunStatus
from fedjax_het.runtime.progress import END, START
from fedjax_het.runtime.result_display import flatten
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, display_name, require
from fedjax_het.utils.io import write_atomically
from fedjax_het.utils.registry import Registry, format_entry
from fedjax_het.utils.signals import defer_signals
from fedjax_het.utils.text import to_one_line

PROJECT = "fedjax_het"
"""Name of the project in Weights & Biases, and of the experiment in MLflow."""
MLFLOW_TAG = "fedjax_het.run"
"""Tag of a run in MLflow whose value is the digest of the run's result."""
MAX_METRICS_PER_CALL, MAX_PARAMS_PER_CALL, MAX_PARAM_LENGTH = 1000, 100, 500
"""Limits of MLflow: metrics and parameters of one call, characters of a parameter's value."""

MAX_NAME_LENGTH = 240
"""Largest number of characters of a name; MLflow allows 250, with a number or prefix."""
MAX_TAG_LENGTH = 5000
"""Limit of MLflow: characters of a tag's value."""
# Curves whose last values TensorBoard lists beside the settings.
_HPARAM_METRICS = ("test_accuracy", "mean_client_accuracy")
# Texts that a tag of TensorBoard and a name in MLflow cannot contain. MLflow's names are paths.
_INVALID_IN_TENSORBOARD = r"[^-/\w.]|^/+"
_INVALID_IN_MLFLOW = r"[^-/\w. :]|^/+|/+$|(?<=/)/+|^\.+|(?<=/)\.+(?=/|$)"

Scalar = str | int | float | bool

log = logging.getLogger("fedjax_het")


class TrackedRun(NamedTuple):
    """The run that a record is opened for."""

    folder: Path
    """The output folder."""
    digest: str
    """Digest of the run's result, which names its files."""
    settings: dict[str, Scalar]
    """Settings by name; nested names have dots, as in `hp.local_lr`."""
    metrics: tuple[str, ...]
    """Names of the curves."""
    done: int
    """Rounds that were done before; more than 0 for a resumed run."""


class RunTracker(Protocol):
    """The record of one run in a tracker."""

    done: int
    """Number of rounds that the record already has; it receives only later rounds."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Add the metrics of a round.

        Args:
          round: number of the round, from 1.
          values: metrics that were measured and are finite, by name.
        """

    def flush(self) -> None:
        """Write all that was logged, so that a kill loses none of it."""

    def close(self, summary: Mapping[str, Scalar]) -> None:
        """Add the summary of the run, which has ended."""


class Tracker(NamedTuple):
    """A program that stores curves."""

    name: str
    """Name in `track`."""
    description: str
    """One line for the list of trackers."""
    open: Callable[[TrackedRun], RunTracker]
    """Function that opens a new record, or continues the record of a stopped run."""
    packages: tuple[str, ...] = ()
    """Packages that the tracker imports."""

    def __repr__(self) -> str:
        return format_entry(self)


def make_valid_names(names: Iterable[str], invalid: str) -> dict[str, str]:
    r"""Return names that a library accepts, all different, by the names of the run.

    Args:
      names: names of metrics or settings.
      invalid: regular expression of the texts that become underscores.

    Returns:
      A valid name of at most 240 characters for each name.

    Example:
      >>> from fedjax_het.runtime.trackers import make_valid_names
      >>> make_valid_names(["loss", "cats?", "cats!"], r"[^\w]")
      {'loss': 'loss', 'cats?': 'cats_', 'cats!': 'cats__2'}
    """
    valid_names: dict[str, str] = {}
    for name in names:
        valid = candidate = re.sub(invalid, "_", name)[:MAX_NAME_LENGTH] or "_"
        copies = itertools.count(2)
        while candidate in valid_names.values():
            candidate = f"{valid}_{next(copies)}"
        valid_names[name] = candidate
    return valid_names


class CsvTracker(RunTracker):
    """Table `csv/<digest>.csv` with a line per round; a resumed run writes all rounds again."""

    def __init__(self, run: TrackedRun):
        self._path = run.folder / "csv" / f"{run.digest}.csv"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self.done, self._buffer = 0, io.StringIO()
        columns = ("round", *run.metrics)
        self._writer = csv.DictWriter(self._buffer, columns, lineterminator="\n")
        self._writer.writeheader()

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Add a line to the buffer.

        Args:
          round: number of the round, from 1.
          values: metrics by name.
        """
        self._writer.writerow({"round": round, **values})

    def flush(self) -> None:
        """Append the buffer to the file."""
        with defer_signals():
            with open(self._path, "ab", buffering=0) as file:
                file.write(self._buffer.getvalue().encode())
                os.fsync(file.fileno())
            self._buffer.seek(0)
            self._buffer.truncate()


class TensorboardTracker(RunTracker):
    """Event file in `tensorboard/<digest>/`, written by tensorboardX without TensorFlow.

    A resumed run writes the file again, and logs all of its rounds. The command
    `tensorboard --logdir results/tensorboard` shows the files.
    """

    def __init__(self, run: TrackedRun):
        from tensorboardX import event_file_writer, summary

        self.done, self._summaries = 0, summary
        self._tags = make_valid_names(run.metrics, _INVALID_IN_TENSORBOARD)
        folder = run.folder / "tensorboard" / run.digest
        folder.mkdir(parents=True, exist_ok=True)
        for old_file in folder.glob("events.out.tfevents.*"):
            old_file.unlink()
        # The thread of a FileWriter would keep events that a full disk refuses, and never end.
        self._writer = event_file_writer.EventsWriter(str(folder / "events"))
        accuracies = {name: 0.0 for name in _HPARAM_METRICS if name in run.metrics}
        for part in summary.hparams(run.settings, accuracies):
            self._write_summary(part, 0)
        self._write_text("settings", run.settings, 0)

    def _write_text(self, tag: str, values: Mapping[str, Scalar], round: int) -> None:
        lines = (f"    {name}: {value}" for name, value in values.items())
        self._write_summary(self._summaries.text(tag, "\n".join(lines)), round)

    def _write_summary(self, summary: Any, round: int) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(summary=summary, step=round, wall_time=time.time()))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Write a scalar per metric.

        Args:
          round: number of the round, from 1.
          values: metrics by name.
        """
        for name, value in values.items():
            tag = self._tags.get(name, name)
            self._write_summary(self._summaries.scalar(tag, value), round)

    def flush(self) -> None:
        """Write the file's buffer."""
        self._writer.flush()

    def close(self, summary: Mapping[str, Scalar]) -> None:
        """Write the summary as one text, and close the file."""
        self._write_text("summary", summary, int(summary.get("rounds", self.done)))
        self._writer.close()


class WandbTracker(RunTracker):
    """Run of the project `fedjax_het` in Weights & Biases.

    The file `wandb/<digest>.json` stores the run's id. A run that has not ended is continued.
    Online it continues after the rounds that the server has. Offline (WANDB_MODE=offline) a kill
    may lose buffered rounds, so all rounds are logged again and replace the old files. The command
    `wandb sync results/wandb/offline-run-*` uploads them.
    """

    # An exception may leave runs open, and a process can open a run once.
    open_runs: "dict[str, WandbTracker]" = {}  # noqa: RUF012
    _run: Any
    _last_round: int

    def __init__(self, run: TrackedRun):
        import wandb

        folder = run.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{run.digest}.json"
        self._id = self._read_unfinished_id() or f"{run.digest}-{secrets.token_hex(4)}"
        if (previous := self.open_runs.get(self._id)) is not None:
            self._run, self.done = previous._run, previous._last_round
        else:
            self._run = wandb.init(
                project=PROJECT,
                id=self._id,
                name=run.digest,
                dir=str(run.folder),
                config=dict(run.settings),
                resume="allow",
                reinit="create_new",  # runs of a sweep are open at the same time
            )
            self.done = max(self._run.starting_step - 1, 0)
            if self._run.offline:
                for part in folder.glob(f"offline-run-*-{self._id}"):
                    if part != Path(self._run.dir).parent:
                        shutil.rmtree(part)
        self._last_round = self.done
        self.open_runs[self._id] = self
        self._write_state(ended=False)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Log a step, which the library writes and uploads in another process.

        Args:
          round: number of the round, from 1.
          values: metrics by name.
        """
        self._run.log(dict(values), step=round, commit=True)
        self._last_round = round

    def close(self, summary: Mapping[str, Scalar]) -> None:
        """Add the summary, and end the run."""
        self._run.summary.update(dict(summary))
        self._run.finish()
        self.open_runs.pop(self._id, None)
        self._write_state(ended=True)

    def _write_state(self, *, ended: bool) -> None:
        text = json.dumps({"id": self._id, "ended": ended}).encode()
        write_atomically(self._path, lambda file: file.write(text))

    def _read_unfinished_id(self) -> str | None:
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
            return None if state["ended"] else str(state["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class MlflowTracker(RunTracker):
    """Run of the experiment `fedjax_het` in MLflow.

    Runs are in the database `mlflow.db` of the output folder, or where MLFLOW_TRACKING_URI points
    to. A run that has not ended is continued after the rounds that it has. The command
    `mlflow ui --backend-store-uri sqlite:///results/mlflow.db` shows them.
    """

    def __init__(self, run: TrackedRun):
        import mlflow
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        path = str(run.folder.resolve() / "mlflow.db")
        # A URL's query starts at a question mark, and a percent sign starts an escape. With the
        # driver's name MLflow does not create a folder that has the escaped name.
        escaped = path.replace("%", "%25").replace("?", "%3F")
        uri = f"sqlite:///{path}" if path == escaped else f"sqlite+pysqlite:///{escaped}"
        uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else uri
        self._client, self._metric_type = MlflowClient(tracking_uri=uri), entities.Metric
        experiment = self._client.get_experiment_by_name(PROJECT)
        if experiment is None:
            experiment_id = self._client.create_experiment(PROJECT)
        else:
            experiment_id = experiment.experiment_id
        query = f"tags.`{MLFLOW_TAG}` = '{run.digest}' and attributes.status = 'RUNNING'"
        unfinished = self._client.search_runs([experiment_id], filter_string=query, max_results=1)
        self._buffer: list = []
        self._names = make_valid_names(run.metrics, _INVALID_IN_MLFLOW)
        if unfinished:
            self._id = unfinished[0].info.run_id
            histories = (
                self._client.get_metric_history(self._id, metric)
                for metric in unfinished[0].data.metrics
            )
            self.done = max((max(m.step for m in history) for history in histories), default=0)
            return
        tags = {MLFLOW_TAG: run.digest}
        new_run = self._client.create_run(experiment_id, run_name=run.digest, tags=tags)
        self._id, self.done = new_run.info.run_id, 0
        names = make_valid_names(run.settings, _INVALID_IN_MLFLOW)
        params = [
            entities.Param(names[name], str(text)[:MAX_PARAM_LENGTH])
            for name, text in run.settings.items()
        ]
        for start in range(0, len(params), MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS_PER_CALL])

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Add metrics to the buffer; one call writes all metrics of a round.

        Args:
          round: number of the round, from 1.
          values: metrics by name.
        """
        if len(self._buffer) + len(values) > MAX_METRICS_PER_CALL:
            self.flush()
        now = int(time.time() * 1000)
        self._buffer += [
            self._metric_type(self._names[name], value, now, round)
            for name, value in values.items()
        ]

    def flush(self) -> None:
        """Write the buffer."""
        for start in range(0, len(self._buffer), MAX_METRICS_PER_CALL):
            metrics = self._buffer[start : start + MAX_METRICS_PER_CALL]
            self._client.log_batch(self._id, metrics=metrics)
        self._buffer = []

    def close(self, summary: Mapping[str, Scalar]) -> None:
        """Add the summary as tags, and end the run."""
        self.flush()
        names = make_valid_names(summary, _INVALID_IN_MLFLOW)
        for name, value in summary.items():
            tag = f"summary.{names[name]}"
            self._client.set_tag(self._id, tag, str(value)[:MAX_TAG_LENGTH])
        self._client.set_terminated(self._id)


TRACKERS: Registry[Tracker] = Registry(
    "tracker",
    (
        Tracker("csv", "a table of every run, a line per round", CsvTracker),
        Tracker("tensorboard", "TensorBoard's event files", TensorboardTracker, ("tensorboardX",)),
        Tracker("wandb", "Weights & Biases, online and offline", WandbTracker, ("wandb",)),
        Tracker(
            "mlflow",
            "MLflow, in a database in the output folder or on a server",
            MlflowTracker,
            ("mlflow", "sqlalchemy", "alembic"),
        ),
    ),
    argument="track",
)
"""All trackers by name."""


@validate_arguments
def register_tracker(
    name: str, open: Callable[[TrackedRun], RunTracker], *, description: str = ""
) -> None:
    """Register a tracker for this process.

    Args:
      name: name in `track`.
      open: function that opens the record of a run, see `RunTracker` for its methods.
      description: one line for lists.

    Raises:
      ConfigError: for a name that is no identifier, or the name of a built-in tracker.

    Example:
      >>> from fedjax_het import register_tracker
      >>> class Printer:
      ...     def __init__(self, run):
      ...         self.done = run.done
      ...     def log(self, round, values):
      ...         print(round, values["test_accuracy"])
      ...     def flush(self):
      ...         pass
      ...     def close(self, summary):
      ...         print(summary["final_accuracy"])
      >>> register_tracker("printer", Printer, description="standard output")
    """
    TRACKERS.add(Tracker(name, description, open))


def add_tracker_callback(
    callbacks: Sequence[Callback],
    track: Sequence[str],
    folder: Path | None,
    *,
    argument: str = "output_dir",
) -> list[Callback]:
    """Return the callbacks of a run with its trackers.

    Args:
      callbacks: callbacks of the user.
      track: names of trackers.
      folder: folder of the records; None if the user passed none.
      argument: name of the argument of the folder, for messages.

    Returns:
      A callback for the trackers, if there are any, followed by the user's callbacks.

    Raises:
      ConfigError: see `require_trackers`.
    """
    require_trackers(track, folder, argument=argument)
    if folder is None or not track:
        return list(callbacks)
    return [TrackerCallback(track, folder), *callbacks]


def require_trackers(
    track: Sequence[str], folder: Path | None, *, argument: str = "output_dir"
) -> None:
    """Check that trackers can be used.

    Args:
      track: names of trackers.
      folder: folder of the records; None if the user passed none.
      argument: name of the argument of the folder, for messages.

    Raises:
      ConfigError: for unknown names, missing packages, and without a folder.
    """
    for name in track:
        packages = TRACKERS.require(name).packages
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"{display_name('track')} = {name!r}: expected its packages, but "
                f"{', '.join(missing)} cannot be imported: pip install 'fedjax_het[{name}]'"
            )
    require(not track or folder is not None, "track", list(track), f"an {argument} to write to")


class TrackerCallback:
    """Callback that keeps a record of every run in every tracker.

    A tracker that fails is logged and ignored from then on, so that it cannot end a run.
    """

    def __init__(self, track: Sequence[str], folder: Path):
        self._folder = folder
        self._openers = {name: TRACKERS[name].open for name in track}
        self._records: dict[tuple[str, str], RunTracker] = {}  # by tracker and run

    def __call__(self, status: RunStatus) -> None:
        """Log the new rounds of a run."""
        if jax.process_index() != 0:
            return
        for name in list(self._openers):
            try:
                self._update_record(name, status)
            except Exception as error:  # of libraries, networks and disks
                del self._openers[name]
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                text = f"track = {name!r}: cannot be written ({reason}): runs continue without"
                log.warning("%s", to_one_line(text))

    def _update_record(self, name: str, status: RunStatus) -> None:
        curves = {
            to_one_line(metric): curve
            for metric, curve in status.metrics.items()
            if curve.ndim == 1
        }
        if (name, status.digest) not in self._records:
            if status.phase != START:
                return
            settings = _flatten_values(status.settings)
            run = TrackedRun(self._folder, status.digest, settings, tuple(curves), status.done)
            self._records[name, status.digest] = self._openers[name](run)
        record = self._records[name, status.digest]
        for i in range(record.done, status.done):
            values = {metric: float(curve[i]) for metric, curve in curves.items()}
            with defer_signals():  # the next call would log the round again
                record.log(i + 1, {metric: v for metric, v in values.items() if math.isfinite(v)})
                record.done = i + 1
        record.flush()
        if status.result is not None and status.phase == END:
            record.close(_flatten_values(status.result.summary))
            del self._records[name, status.digest]


def _flatten_values(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return nested values by dotted names, without None; others than scalars become text."""
    flat: dict[str, Scalar] = {}
    for name, value in flatten(values).items():
        value = value.item() if isinstance(value, np.generic) else value
        if value is not None:
            value = to_one_line(value) if isinstance(value, str) else value
            flat[to_one_line(name)] = value if isinstance(value, Scalar) else str(value)
    return flat
