"""Inputs of the program of a run's rounds, and its static parts."""

from typing import Any, NamedTuple

import jax

from fedjax_het.attacks import Backdoor
from fedjax_het.core.client_loop import ClientExamples, Examples, RoundSchedule
from fedjax_het.core.evaluation import ClientTests, EvaluationSet
from fedjax_het.core.example_transform import SkewInputs
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.task import Task
from fedjax_het.metrics.registry import Metric, metric_shapes


class ChunkInputs(NamedTuple):
    """Inputs of a chunk of rounds in addition to the state.

    All are traced, so one program serves a run.

    `runtime.group_state` makes them on the host.
    """

    hp: Any
    "Values of the hyperparameters by name, `[]` float32."
    train_key: jax.Array
    "PRNG key of the run's stream `TRAIN`."
    schedule: RoundSchedule
    "`[R, ...]`."
    num_rounds: jax.Array
    "`[]` int32: rounds to run, at most R."
    num_eval_batches: jax.Array
    "`[]` int32: batches of the test set per block."
    examples: ClientExamples
    "The clients' training examples."
    tuning_schedule: RoundSchedule | None = None
    "`[R, ...]` of all clients, for methods whose clients tune copies of the global model."
    test_set: EvaluationSet | None = None
    "None for methods without a global model."
    client_tests: ClientTests | None = None
    "None if clients have no own tests."
    test_examples: ClientExamples | None = None
    "The examples that `client_tests` indexes."
    validation_set: EvaluationSet | None = None
    "All validation examples: positions in `examples` in place of inputs; None without them."
    client_validation: ClientTests | None = None
    "Validation examples of each client, positions in `examples`; None if clients have no tests."
    server_examples: Examples | None = None
    "`[n_0, ...]`; None for a server without examples."
    diagnostics_schedule: RoundSchedule | None = None
    "One round of all clients, if diagnostics of their data are measured."
    method_inputs: dict[str, Any] = {}  # noqa: RUF012
    "Arrays that the method requests, by name, see `RoundInput`."
    skew: SkewInputs | None = None
    "The run's label skews and feature skews; None for a run without."
    lr_factors: jax.Array | None = None
    "`[R]` factors of `local_lr`; None for a constant rate."


class EvaluationOptions(NamedTuple):
    """Measurements in addition to the test set; static."""

    num_clients: int
    num_domains: int = 0
    "Domains of the data set."
    has_client_tests: bool = False
    diagnostics_every: int = 0
    "Rounds between diagnostics on all clients' data; 0: never."
    has_validation: bool = False
    metrics: tuple[Metric, ...] = ()
    output_shape: tuple[int, ...] = ()
    "Shape of the outputs of one example, if there are metrics."
    label_shape: tuple[int, ...] = ()
    "Shape of the label of one example, if there are metrics."
    label_dtype: str = "int32"
    "Type of the labels, if there are metrics."
    records_client_losses: bool = False
    "Whether the training loss of each client is recorded, for client selection by losses."
    backdoor: Backdoor | None = None
    "The attack whose success on the global model is measured."

    @property
    def example_metrics(self) -> tuple[Metric, ...]:
        """The metrics of the global model's outputs."""
        return tuple(metric for metric in self.metrics if metric.sums is not None)

    @property
    def metric_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the values of `example_metrics`, and of `attack_success`, by name."""
        formats = (self.output_shape, self.label_shape, self.label_dtype)
        success = {} if self.backdoor is None else {"attack_success": ()}
        return {**metric_shapes(self.example_metrics, *formats), **success}

    @property
    def update_metric_names(self) -> tuple[str, ...]:
        """Names of the scalar metrics of the clients' updates."""
        return tuple(name for metric in self.metrics for name in metric.update_metric_names)


class RoundComponents(NamedTuple):
    """Parts of a run's rounds; static."""

    algorithm: Any
    "The method, an `Algorithm`."
    task: Task
    plan: ExecutionPlan
    evaluation: EvaluationOptions
