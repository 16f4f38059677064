"""Measurements of rounds."""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.core.gradient_diagnostics import GRADIENT_GAP_NAMES
from fedjax_het.metrics.registry import Metric, metric_shapes


class RoundMetrics(NamedTuple):
    """Measurements of each round, float32 `[R, ...]`; NaN where nothing was measured."""

    test_accuracy: jax.Array
    "Accuracy of the global model."
    test_loss: jax.Array
    "Mean cross-entropy of the global model, in nats."
    train_loss: jax.Array
    "Mean loss of local training, in nats."
    update_norm: jax.Array
    "Norm of the global model's change."
    domain_accuracy: jax.Array | None
    "`[R, G]`; None for a data set without domains."
    client_accuracy: jax.Array | None
    "`[R, K]`; None if clients have no tests of their own."
    records: dict[str, jax.Array]
    "Records of the method, and diagnostics, by name."
    metrics: dict[str, jax.Array]
    "Values of the run's metrics, by name."
    is_finite: jax.Array
    "1 if the losses, the update and the state of the round are finite, else 0."


class EvaluationOptions(NamedTuple):
    """Measurements in addition to the test set; static."""

    num_clients: int
    num_domains: int = 0
    "Domains of the data set."
    has_client_tests: bool = False
    diagnostics_every: int = 0
    "Rounds between diagnostics on all clients' data; 0: never."
    metrics: tuple[Metric, ...] = ()
    num_classes: int = 0
    "Classes of the data set, if there are metrics."

    @property
    def example_metrics(self) -> tuple[Metric, ...]:
        """The metrics of the global model's outputs."""
        return tuple(metric for metric in self.metrics if metric.sums is not None)

    @property
    def metric_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the values of `example_metrics`, by name."""
        return metric_shapes(self.example_metrics, self.num_classes)

    @property
    def update_metric_names(self) -> tuple[str, ...]:
        """Names of the scalar metrics of the clients' updates."""
        return tuple(name for metric in self.metrics for name in metric.update_metric_names)

    def missing_metrics(self, algorithm: Any, num_rounds: int) -> RoundMetrics:
        """Return the metrics of rounds in which nothing was measured.

        Args:
          algorithm: the method, an `Algorithm`.
          num_rounds: number of rounds, R.

        Returns:
          NaN of the shapes of all metrics, on the host.
        """

        def nan(*shape):
            return np.full((num_rounds, *shape), np.nan, np.float32)

        shapes = algorithm.record_shapes(self.num_clients)
        if self.diagnostics_every:
            diagnostics = algorithm.diagnostics
            names = GRADIENT_GAP_NAMES if diagnostics is None else diagnostics.names
            shapes = shapes | dict.fromkeys(names, ())
        has_domains = self.num_domains and algorithm.global_model
        metric_shapes = {**self.metric_shapes, **dict.fromkeys(self.update_metric_names, ())}
        return RoundMetrics(
            test_accuracy=nan(),
            test_loss=nan(),
            train_loss=nan(),
            update_norm=nan(),
            domain_accuracy=nan(self.num_domains) if has_domains else None,
            client_accuracy=nan(self.num_clients) if self.has_client_tests else None,
            records={name: nan(*shape) for name, shape in shapes.items()},
            metrics={name: nan(*shape) for name, shape in metric_shapes.items()},
            is_finite=nan(),
        )
