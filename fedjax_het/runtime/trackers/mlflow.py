"""MLflow: a run of the experiment fedjax_het for every run, in `mlflow.db` (SQLite) of the output
folder, or where MLFLOW_TRACKING_URI says.

`mlflow ui --backend-store-uri sqlite:///results/mlflow.db` shows them.
"""

import time
from collections.abc import Mapping

from fedjax_het.runtime.trackers.base import TrackedRun, Tracker

EXPERIMENT = "fedjax_het"
TAG = "fedjax_het.run"  # whose value is the name of the run's files
MAX_METRICS_PER_CALL = 1000  # metrics in one call, which are written together
MAX_PARAMS_PER_CALL = 100  # parameters
MAX_PARAM_LENGTH = 500  # of a parameter's text


class MlflowTracker:
    """A run that had not ended is gone on with, from the round after those that it has."""

    def __init__(self, run_info: TrackedRun):
        import mlflow
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = f"sqlite:///{run_info.folder.resolve() / 'mlflow.db'}"
        if mlflow.is_tracking_uri_set():
            uri = mlflow.get_tracking_uri()
        self._client = MlflowClient(tracking_uri=uri)
        existing_experiment = self._client.get_experiment_by_name(EXPERIMENT)
        experiment_id = (
            self._client.create_experiment(EXPERIMENT)
            if existing_experiment is None
            else existing_experiment.experiment_id
        )
        run_filter = f"tags.`{TAG}` = '{run_info.digest}' and attributes.status = 'RUNNING'"
        unfinished_runs = self._client.search_runs(
            [experiment_id], filter_string=run_filter, max_results=1
        )
        self._buffer: list = []
        if unfinished_runs:
            self._id = unfinished_runs[0].info.run_id
            steps = [self._get_last_step(metric) for metric in unfinished_runs[0].data.metrics]
            self.done = max(steps, default=0)
            return
        run = self._client.create_run(
            experiment_id, run_name=run_info.digest, tags={TAG: run_info.digest}
        )
        self._id, self.done = run.info.run_id, 0
        params = [
            Param(name, str(text)[:MAX_PARAM_LENGTH]) for name, text in run_info.settings.items()
        ]
        for first in range(0, len(params), MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS_PER_CALL])

    def _get_last_step(self, metric: str) -> int:
        return max(
            measurement.step for measurement in self._client.get_metric_history(self._id, metric)
        )

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if (
            len(self._buffer) + len(values) > MAX_METRICS_PER_CALL
        ):  # a round's together, so that a kill cuts none
            self.flush()
        now = int(time.time() * 1000)
        self._buffer += [Metric(name, value, now, round) for name, value in values.items()]

    def flush(self) -> None:
        for first in range(0, len(self._buffer), MAX_METRICS_PER_CALL):
            self._client.log_batch(
                self._id, metrics=self._buffer[first : first + MAX_METRICS_PER_CALL]
            )
        self._buffer = []

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        self.flush()
        for name, value in summary.items():
            self._client.set_tag(self._id, f"summary.{name}", str(value))
        self._client.set_terminated(self._id)


TRACKER = Tracker(
    "mlflow",
    "MLflow, in a database in the output folder or on a server",
    MlflowTracker,
    packages=("mlflow", "sqlalchemy", "alembic"),
)
