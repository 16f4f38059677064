"""MLflow: a run of the experiment fedjax_het for every run, in `mlflow.db` (SQLite) of the output
folder, or where MLFLOW_TRACKING_URI says.

`mlflow ui --backend-store-uri sqlite:///results/mlflow.db` shows them.
"""

import time
from collections.abc import Mapping

from fedjax_het.running.trackers.contract import Opening, Tracker

EXPERIMENT = "fedjax_het"
TAG = "fedjax_het.run"  # whose value is the name of the run's files
MOST = 1000  # metrics in one call, which are written together
FEW = 100  # parameters
LONGEST = 500  # of a parameter's text


class MlflowRun:
    """A run that had not ended is gone on with, from the round after those that it has."""

    def __init__(self, opening: Opening):
        import mlflow
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = f"sqlite:///{opening.folder.resolve() / 'mlflow.db'}"
        if mlflow.is_tracking_uri_set():
            uri = mlflow.get_tracking_uri()
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = (
            self._client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        )
        ours = f"tags.`{TAG}` = '{opening.name}' and attributes.status = 'RUNNING'"
        left = self._client.search_runs([experiment], filter_string=ours, max_results=1)
        self._waiting: list = []
        if left:
            self._id = left[0].info.run_id
            steps = [self._last(metric) for metric in left[0].data.metrics]
            self.done = max(steps, default=0)
            return
        run = self._client.create_run(experiment, run_name=opening.name, tags={TAG: opening.name})
        self._id, self.done = run.info.run_id, 0
        params = [Param(name, str(text)[:LONGEST]) for name, text in opening.settings.items()]
        for first in range(0, len(params), FEW):
            self._client.log_batch(self._id, params=params[first : first + FEW])

    def _last(self, metric: str) -> int:
        return max(each.step for each in self._client.get_metric_history(self._id, metric))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if len(self._waiting) + len(values) > MOST:  # a round's together, so that a kill cuts none
            self.flush()
        now = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now, round) for name, value in values.items()]

    def flush(self) -> None:
        for first in range(0, len(self._waiting), MOST):
            self._client.log_batch(self._id, metrics=self._waiting[first : first + MOST])
        self._waiting = []

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        self.flush()
        for name, value in summary.items():
            self._client.set_tag(self._id, f"summary.{name}", str(value))
        self._client.set_terminated(self._id)


TRACKER = Tracker(
    "mlflow",
    "MLflow, in a database in the output folder or on a server",
    MlflowRun,
    packages=("mlflow", "sqlalchemy", "alembic"),
)
