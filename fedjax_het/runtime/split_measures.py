"""Measures of a split before the first round: distances of features and of gradients.

The metrics `feature_distance` and `gradient_dissimilarity` of a run compute them; `measure_split`
computes them without a run. They do not depend on lanes or devices beyond rounding.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.client_loop import Cohort, SkewedExamples
from fedjax_het.core.example_transform import ExampleTransform
from fedjax_het.core.execution_plan import ExecutionPlan, make_execution_plan
from fedjax_het.core.feature_network import compute_client_features
from fedjax_het.core.gradient_diagnostics import ClientGradients, measure_client_gradients
from fedjax_het.core.memory import MAX_CACHED_PROGRAMS
from fedjax_het.core.miscompile_guard import VerifiedJit
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.core.schedule import RoundSettings, Scheduler
from fedjax_het.core.task import Task
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import Dataset, Partition, PartitionSummary
from fedjax_het.data.heterogeneity import compute_entropies, compute_feature_distances
from fedjax_het.metrics.registry import METRICS, parse_metrics
from fedjax_het.runtime.data_assignment import (
    DataAssignment,
    UserObjects,
    assign_data,
    load_server_pool,
)
from fedjax_het.runtime.signature import Signature, build_signature
from fedjax_het.runtime.trained_model import load_initial_model
from fedjax_het.utils.arrays import fetch_to_host
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.input_kinds import IMAGE_KINDS, get_input_kind, require_input_kind
from fedjax_het.utils.io import digest_arrays

if TYPE_CHECKING:
    import pandas as pd

MAX_STORED = 64
"""Number of results that a process stores for further runs with an equal split."""
_STORED: dict[tuple, Any] = {}
MAX_LANES = 8
"""Number of clients whose gradients are computed in parallel."""


@dataclass(frozen=True, eq=False)
class SplitMeasures:
    """Measures of the division of the examples among K clients; `str` of them is one line.

    Attributes:
      summary: sizes of the clients and distances of their labels.
      sizes: number of examples of each client, int64 `[K]`.
      values: the requested measures by name. Those of `feature_distance`:

        * `feature_distance`: mean over clients, weighted by examples, of the squared Frechet
          distance of a client's features from the features of all clients, in units of the total
          variance of all features, for data of images only;
        * `feature_distance_max`: the largest distance of a client.

        Those of `gradient_dissimilarity`, with the loss F_k of client k, its share p_k of the
        examples, and F = sum_k p_k F_k, at the initial model:

        * `gradient_dissimilarity`: B^2 = sum_k p_k ||grad F_k||^2 / ||grad F||^2 (Li et al., MLSys
          2020, Definition 3);
        * `gradient_variance`: sum_k p_k ||grad F_k - grad F||^2 (Karimireddy et al., ICML 2020,
          (G, B)-BGD, with G^2 at B = 1).
      client_values: measures of each client by name, float64 `[K]`, NaN for a client without
        examples: `label_total_variation` from the classes of all examples, `effective_classes`, and
        as requested `feature_distance`, `gradient_norm` ||grad F_k|| and `gradient_distance`
        ||grad F_k - grad F||.

    Example:
      >>> from fedjax_het import RunSpec, measure_split
      >>> spec = RunSpec(dataset="digits", model="mlp", num_clients=3)
      >>> measures = measure_split(spec, metrics=["gradient_dissimilarity"])
      >>> list(measures.values), measures.client_values["gradient_norm"].shape
      (['gradient_dissimilarity', 'gradient_variance'], (3,))
    """

    summary: PartitionSummary
    sizes: np.ndarray
    values: dict[str, float] = field(default_factory=dict)
    client_values: dict[str, np.ndarray] = field(default_factory=dict)

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row per client: its number of examples and its measures.

        Returns:
          A frame with the index `client`.
        """
        import pandas as pd

        index = pd.RangeIndex(len(self.sizes), name="client")
        return pd.DataFrame({"examples": self.sizes, **self.client_values}, index=index)

    def to_summary(self) -> dict[str, Any]:
        """Return all measures of the split by name, values that JSON can hold."""
        measures = {name: v if np.isfinite(v) else None for name, v in self.values.items()}
        return {**dataclasses.asdict(self.summary), **measures}

    def __str__(self) -> str:
        return "; ".join([str(self.summary), *describe_measures(self.values)])


def describe_measures(values: Mapping[str, float | None]) -> list[str]:
    """Return measures in words, such as "feature distance 0.12".

    Args:
      values: measures by name; None and NaN are left out.

    Returns:
      A text for each measure.
    """
    return [
        f"{name.replace('_', ' ')} {value:.3g}"
        for name, value in values.items()
        if value is not None and not np.isnan(value)
    ]


@validate_arguments
def measure_split(
    spec: RunSpec,
    *,
    metrics: Sequence[str] | None = None,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    network: Any = None,
    optimizer: Any = None,
    data_dir: str | os.PathLike | None = None,
) -> SplitMeasures:
    """Measure the heterogeneity of a run's clients, without the run.

    The measures include the skews of the run. Drift is left out: all examples of a client count.

    `feature_distance` reads images; other inputs raise ConfigError. `gradient_dissimilarity` reads
    inputs of every kind and labels of every task.

    Cost: for `feature_distance` one pass through a small network; for `gradient_dissimilarity` two
    passes over the data, each with a backward pass, at the initial model of the run's seed.

    Args:
      spec: the settings of the run.
      metrics: names of measures that cost time; measures of labels and sizes are always computed.
        Default: `gradient_dissimilarity`, and for images also `feature_distance`.
      dataset: the user's data set (default: the data set of `spec`).
      partition: the user's partition (default: the partition of `spec`).
      network: the user's network (default: the network of `spec`).
      optimizer: the clients' optimizer (default: the optimizer of `spec`).
      data_dir: folder of the prepared data that `spec` names (default: TFDS_DATA_DIR).

    Returns:
      The measures, with values for each client.

    Raises:
      ConfigError: if a setting or an object cannot be used, or for a name that is no measure of a
        split.

    Example:
      >>> from fedjax_het import RunSpec, measure_split
      >>> spec = RunSpec(dataset="digits", num_clients=4, skew="noise:std=0.3")
      >>> measures = measure_split(spec, metrics=["feature_distance"])
      >>> measures.values["feature_distance"] < measures.values["feature_distance_max"]
      True
      >>> list(measures.to_pandas())
      ['examples', 'label_total_variation', 'effective_classes', 'feature_distance']
    """
    valid = [name for name, metric in METRICS.items() if metric.split_measure_names]
    for name in metrics or ():
        require(name in valid, "metrics", name, f"measures of a split: {', '.join(valid)}")
    user_objects = UserObjects(dataset, partition, network, optimizer, data_dir)
    resolved = user_objects.resolve(spec).resolved()
    data = user_objects.load_dataset(resolved, caller="measure_split")
    pool = load_server_pool(resolved, data, data_dir)
    assignment = assign_data(resolved, data, pool, partition)
    if metrics is None:
        is_image = get_input_kind(data.input_shape, data.num_tokens) in IMAGE_KINDS
        metrics = [name for name in valid if is_image or name != "feature_distance"]
    signature = build_signature(resolved, data, network, optimizer)
    initial_model = load_initial_model(resolved, signature)
    variables = None if initial_model is None else initial_model.variables
    return measure_assignment(assignment, signature, variables, metrics)


def list_split_metrics(spec: RunSpec) -> list[str]:
    """Return the names of the metrics of a run that are measures of its split."""
    return [metric.name for metric in parse_metrics(spec.metrics) if metric.split_measure_names]


def measure_assignment(
    assignment: DataAssignment, signature: Signature, variables: Any, metrics: Sequence[str]
) -> SplitMeasures:
    """Measure the heterogeneity of assigned data.

    Runs of a process with an equal split, such as a sweep over methods, share one computation.

    Args:
      assignment: the data of the clients.
      signature: the static choices of the run.
      variables: the initial model; None: drawn from the seed of the run.
      metrics: names of measures that cost time.

    Returns:
      The measures.
    """
    partition, dataset = assignment.partition, assignment.client_dataset
    has_examples = partition.sizes > 0

    def mask(values: np.ndarray) -> np.ndarray:
        return np.where(has_examples, values, np.nan)

    counts = partition.label_counts(dataset.train_classes, dataset.num_classes)
    distributions = counts / np.maximum(partition.sizes[:, None], 1)
    pooled = counts.sum(0) / counts.sum()
    client_values = {
        "label_total_variation": mask(np.abs(distributions - pooled).sum(1) / 2),
        "effective_classes": mask(np.exp(compute_entropies(distributions))),
    }
    shares = partition.sizes / partition.sizes.sum()
    values: dict[str, float] = {}
    if "feature_distance" in metrics:
        split = _digest_split(assignment)
        distances = _compute_once(split, lambda: _measure_features(assignment)).copy()
        client_values["feature_distance"] = distances
        values["feature_distance"] = float(shares @ np.where(has_examples, distances, 0))
        values["feature_distance_max"] = float(np.nanmax(distances))
    if "gradient_dissimilarity" in metrics:
        measure = functools.partial(_measure_gradients, assignment, signature, variables)
        spec, key = assignment.spec, None
        if variables is None:  # the seed draws the model
            task = signature.training.task
            key = (*_digest_split(assignment), task, spec.seed, spec.batch_size)
        squared_norm, squared_norms, squared_distances = _compute_once(key, measure)
        client_values["gradient_norm"] = mask(np.sqrt(squared_norms))
        client_values["gradient_distance"] = mask(np.sqrt(squared_distances))
        with np.errstate(divide="ignore", invalid="ignore"):
            values["gradient_dissimilarity"] = float(shares @ squared_norms / squared_norm)
        values["gradient_variance"] = float(shares @ squared_distances)
    summary = assignment.summarize_partition()
    return SplitMeasures(summary, partition.sizes, values, client_values)


def _digest_split(assignment: DataAssignment) -> tuple[str, ...]:
    """Return digests of the examples of each client, as the client sees them."""
    features = assignment.skew.features
    leaves = jax.tree.leaves([arrays for _, arrays in features])
    arrays = {"labels": assignment.client_dataset.train_labels}
    arrays |= {f"skew {i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    seed = assignment.spec.partition_seed
    constants = {"skews": [repr(skew) for skew, _ in features], "partition_seed": seed}
    digest = digest_arrays(arrays, constants)
    return assignment.dataset.digest(), assignment.partition.digest(), digest


def _compute_once(key: tuple | None, compute: Callable[[], Any]) -> Any:
    """Return the stored result of a key, or compute it; None: compute it in any case."""
    if key is None:
        return compute()
    if key not in _STORED:
        if len(_STORED) >= MAX_STORED:
            del _STORED[next(iter(_STORED))]
        _STORED[key] = compute()
    return _STORED[key]


def _measure_features(assignment: DataAssignment) -> np.ndarray:
    """Return the feature distance of each client, float64 `[K]`."""
    dataset = assignment.dataset
    owner = "metric 'feature_distance'"
    require_input_kind(owner, dataset.input_shape, dataset.num_tokens, IMAGE_KINDS)
    partition, skew = assignment.partition, assignment.make_skew_inputs(1)
    key = make_stream_key(assignment.spec.partition_seed, Stream.SKEW)
    transform = skew.transform or ExampleTransform((), key, ())
    owners = np.repeat(np.arange(partition.num_clients), partition.sizes)
    features = compute_client_features(dataset.train_inputs, transform, partition.indices, owners)
    return compute_feature_distances(features, owners, partition.num_clients)


def _measure_gradients(
    assignment: DataAssignment, signature: Signature, variables: Any
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return ||grad F||^2, and ||grad F_k||^2 and ||grad F_k - grad F||^2 in float64 `[K]`."""
    spec, partition, task = assignment.spec, assignment.partition, signature.training.task
    if variables is None:
        variables = jax.jit(task.model.init)(make_stream_key(spec.seed, Stream.INIT))
    plan, program = _build_gradient_program(task, partition.num_clients)
    work = ClientWork(partition, 1, spec.batch_size)
    scheduler = Scheduler(work, RoundSettings(0, averaging="weighted"), plan.blocks, plan.lanes)
    skew = assignment.make_skew_inputs(1)
    inputs = assignment.dataset.train_inputs
    examples = jax.device_put(SkewedExamples(inputs, skew.train_labels, skew.transform))
    reference = jax.tree.map(jnp.zeros_like, variables["params"])
    first_step = scheduler.make_first_step_round(0)
    program.verify((variables, reference, first_step, examples), str(skew.transform is None))
    schedule = scheduler.make_round(0)
    # The second pass measures distances from the mean of the first one, without cancellation.
    mean = program(variables, reference, schedule, examples).mean
    gradients = jax.tree.map(fetch_to_host, program(variables, mean, schedule, examples))
    leaves = jax.tree.leaves(gradients.mean)
    squared_norm = sum(np.square(leaf, dtype=np.float64).sum() for leaf in leaves)
    norms = (gradients.squared_norms, gradients.squared_distances)
    return squared_norm, *(np.asarray(norm, np.float64) for norm in norms)


@functools.lru_cache(maxsize=MAX_CACHED_PROGRAMS)
def _build_gradient_program(task: Task, num_clients: int) -> tuple[ExecutionPlan, VerifiedJit]:
    plan = make_execution_plan(min(num_clients, MAX_LANES), 1, mesh_axis=None)

    def measure(variables, reference, schedule, examples) -> ClientGradients:
        cohort = Cohort(schedule, examples)
        return measure_client_gradients(task, plan, variables, reference, cohort)

    return plan, VerifiedJit(measure, name="gradients of clients")


def clear_programs() -> None:
    """Drop the programs of all networks, and stored results."""
    _build_gradient_program.cache_clear()
    _STORED.clear()
