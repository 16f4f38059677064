"""Registry of the metrics that the setting `metrics` names, in addition to accuracy and loss.

Metrics are computed from sums over test examples, from the clients' accuracies, or from the
updates that clients send.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.metrics.declarations import (
    FAMILY_INFOS,
    INFOS,
    NOT_TRAINED,
    UNDEFINED,
    MetricInfo,
)
from fedjax_het.metrics.personal import worst_decile
from fedjax_het.utils.config import validate_arguments, validate_fields
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.registry import Registry, format_entry

Tree = Any
BatchSumsFunction = Callable[[jax.Array, jax.Array, jax.Array], Tree]
FinishFunction = Callable[[Tree], dict[str, jax.Array]]
NUM_CALIBRATION_BINS = 15  # bins of the confidence in the calibration error


class Metric(NamedTuple):
    """Description of a metric, of exactly one of four kinds.

    Attributes:
      name: name of the metric in settings.
      description: one line for `fedjax-het list`.
      sums: for a metric of the global model on the test examples, in every evaluation, on the
        devices: function `(logits, labels, mask) -> sums`. `logits` are float32 `[B, C]`, `labels`
        int32 `[B]`, and `mask` float32 `[B]` is 1 for an example and 0 for padding. Other tasks
        have outputs and labels of their own shapes. The result is a pytree of arrays, which is
        summed over all batches.
      finish: function `(sums) -> values` that maps the total of `sums` to arrays by name.
      from_client_accuracy: for a metric of the clients' accuracies on their own tests. A NumPy
        function of accuracies `[rounds, K]`, NaN for a missing test, and of the numbers of test
        examples `[K]`. It returns arrays `[rounds]` by name.
      update_metric_names: names of the metrics of a round's client updates, see
        `fedjax_het.core.drift`.
      split_measure_names: names of the measures of the clients' data before the first round, see
        `fedjax_het.runtime.split_measures`. Results have them in the summary's `split`.
      infos: pairs of a value's name and its declaration.
      needs_classes: whether labels must be classes.

    Example:
      >>> from fedjax_het.metrics.registry import METRICS
      >>> METRICS["drift"].update_metric_names
      ('drift_cosine', 'drift_distance')
    """

    name: str
    description: str
    sums: BatchSumsFunction | None = None
    finish: FinishFunction | None = None
    from_client_accuracy: Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]] | None = None
    update_metric_names: tuple[str, ...] = ()
    split_measure_names: tuple[str, ...] = ()
    infos: tuple[tuple[str, MetricInfo], ...] = ()
    needs_classes: bool = False

    def __repr__(self) -> str:
        return format_entry(self)


def confusion_matrix(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Count examples by class and predicted class.

    Args:
      logits: float32 `[B, C]`.
      labels: int32 `[B]` in [0, C).
      mask: float32 `[B]`, 1 for an example, 0 for padding.

    Returns:
      Counts, float32 `[C, C]`: row of the class, column of the prediction. NaN if a logit of an
      example is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.metrics.registry import confusion_matrix
      >>> logits = jnp.array([[2.0, 1.0], [3.0, 0.0], [0.0, 1.0]])
      >>> confusion_matrix(logits, jnp.array([0, 1, 1]), jnp.ones(3)).tolist()
      [[1.0, 0.0], [1.0, 1.0]]
    """
    num_classes = logits.shape[-1]
    weights = jnp.where(jnp.isfinite(logits).all(-1), mask, jnp.where(mask > 0, jnp.nan, 0.0))
    true_classes = (labels[:, None] == jnp.arange(num_classes)).astype(jnp.float32)
    predicted_classes = (logits.argmax(-1)[:, None] == jnp.arange(num_classes)).astype(jnp.float32)
    true_weights = true_classes * weights[:, None]
    return jnp.einsum("bc,bd->cd", true_weights, predicted_classes, precision="highest")


def class_fractions(table: jax.Array, axis: int) -> jax.Array:
    """Divide the diagonal of a confusion matrix by the sums over an axis.

    Args:
      table: counts `[C, C]`: row of the class, column of the prediction.
      axis: 1 for the accuracy on each class (recall), 0 for the precision of each prediction.

    Returns:
      Fractions, float32 `[C]`; NaN where the sum is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.metrics.registry import class_fractions
      >>> class_fractions(jnp.array([[1.0, 0.0], [1.0, 3.0]]), axis=1).tolist()
      [1.0, 0.75]
    """
    totals = table.sum(axis)
    return jnp.where(totals > 0, jnp.diagonal(table) / jnp.maximum(totals, 1), jnp.nan)


def macro_f1(table: jax.Array) -> jax.Array:
    """Average F1 = 2 TP / (2 TP + FP + FN) over the classes that are present or predicted.

    Args:
      table: counts `[C, C]`: row of the class, column of the prediction.

    Returns:
      The mean, a float32 scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.metrics.registry import macro_f1
      >>> float(macro_f1(jnp.array([[2.0, 0.0], [0.0, 2.0]])))
      1.0
    """
    num_correct = jnp.diagonal(table)
    num_true_or_predicted = table.sum(0) + table.sum(1)
    is_present = num_true_or_predicted > 0
    f1 = jnp.where(is_present, 2 * num_correct / jnp.maximum(num_true_or_predicted, 1), 0)
    return f1.sum() / is_present.sum()


def reliability_bins(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum numbers of examples, confidences and correct predictions in bins of the confidence.

    Args:
      logits: float32 `[B, C]`.
      labels: int32 `[B]` in [0, C).
      mask: float32 `[B]`, 1 for an example, 0 for padding.

    Returns:
      Float32 `[3, NUM_CALIBRATION_BINS]`: number of examples, sum of their confidences, and number
      of correct predictions in each bin. NaN if a logit of an example is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.metrics.registry import reliability_bins
      >>> logits = jnp.array([[50.0, 0.0], [50.0, 0.0]])
      >>> reliability_bins(logits, jnp.array([0, 1]), jnp.ones(2))[:, -1].tolist()
      [2.0, 2.0, 1.0]
    """
    confidence = jax.nn.softmax(logits).max(-1)
    is_correct = (logits.argmax(-1) == labels).astype(jnp.float32)
    # The bins are (0, 1/15], (1/15, 2/15], ...
    last_bin = NUM_CALIBRATION_BINS - 1
    bin_index = jnp.clip(jnp.ceil(confidence * NUM_CALIBRATION_BINS) - 1, 0, last_bin)
    bin_mask = (bin_index[:, None] == jnp.arange(NUM_CALIBRATION_BINS)) * mask[:, None]
    nan_if_nonfinite = jnp.where(jnp.isfinite(logits).all(-1) | (mask == 0), 0.0, jnp.nan).sum()
    values = jnp.stack([jnp.ones_like(confidence), confidence, is_correct])
    values = jnp.where(mask > 0, values, 0)
    return jnp.einsum("nb,bk->nk", values, bin_mask, precision="highest") + nan_if_nonfinite


def calibration_error(bins: jax.Array) -> jax.Array:
    """Compute the expected calibration error (Guo et al., 2017).

    Args:
      bins: sums in each bin, see `reliability_bins`.

    Returns:
      The sum over bins of |correct - confidence|, divided by the number of examples; a float32
      scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.metrics.registry import calibration_error
      >>> float(calibration_error(jnp.array([[2.0], [2.0], [1.0]])))
      0.5
    """
    count, confidence, num_correct = bins
    return jnp.abs(num_correct - confidence).sum() / count.sum()


def compute_fairness(accuracy: np.ndarray) -> dict[str, np.ndarray]:
    """Compute how unequally a model serves the clients in each round.

    Args:
      accuracy: accuracies `[rounds, K]` in [0, 1]; NaN for a client without a test.

    Returns:
      Three float64 arrays `[rounds]` by name, NaN in rounds without any tested client:

      * `worst_decile`: mean accuracy of the worst tenth of the clients, see
        `personal.worst_decile`.
      * `accuracy_variance`: variance over clients.
      * `accuracy_gini`: Gini coefficient, the mean absolute difference of two clients divided by
        twice the mean; 0 if all clients have equal accuracy.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.registry import compute_fairness
      >>> fairness = compute_fairness(np.array([[0.5, 1.0, np.nan]]))
      >>> {name: float(values[0]) for name, values in fairness.items()}
      {'worst_decile': 0.5, 'accuracy_variance': 0.0625, 'accuracy_gini': 0.16666666666666666}
    """
    names = ("worst_decile", "accuracy_variance", "accuracy_gini")
    values = {name: np.full(len(accuracy), np.nan) for name in names}
    for r, row in enumerate(np.asarray(accuracy, np.float64)):
        accuracies = np.sort(row[np.isfinite(row)])
        if not len(accuracies):
            continue
        ranks = np.arange(1, len(accuracies) + 1)
        total = accuracies.sum()
        weighted_rank_sum = (2 * ranks - len(accuracies) - 1) @ accuracies
        gini = weighted_rank_sum / (len(accuracies) * total) if total > 0 else 0.0
        row_values = (worst_decile(accuracies), accuracies.var(), gini)
        for name, value in zip(names, row_values, strict=True):
            values[name][r] = value
    return values


def compute_pooled_accuracy(accuracy: np.ndarray, test_sizes: np.ndarray) -> np.ndarray:
    """Compute the fraction of correct outputs over the tests of all clients together.

    Each test example has the same weight, as in PFLlib. The mean over clients gives each client the
    same weight.

    Args:
      accuracy: accuracies `[rounds, K]` in [0, 1]; NaN for a client that was not measured.
      test_sizes: number of test examples of each client, integers `[K]`.

    Returns:
      Fractions, float64 `[rounds]`; NaN in rounds in which a client with a test was not measured.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.registry import compute_pooled_accuracy
      >>> compute_pooled_accuracy(np.array([[0.5, 1.0, np.nan]]), np.array([30, 10, 0]))
      array([0.625])
    """
    has_test = test_sizes > 0
    correct = np.asarray(accuracy, np.float64)[:, has_test] @ test_sizes[has_test]
    return correct / max(test_sizes.sum(), 1)


METRICS: Registry[Metric] = Registry(
    "metric",
    (
        Metric(
            "class_accuracy",
            "accuracy on the examples of each class",
            confusion_matrix,
            lambda table: {"class_accuracy": class_fractions(table, 1)},
            infos=(("class_accuracy", MetricInfo("Accuracy of a class", "", True, True)),),
            needs_classes=True,
        ),
        Metric(
            "macro_f1",
            "unweighted mean of the classes' F1",
            confusion_matrix,
            lambda table: {"macro_f1": macro_f1(table)},
            infos=(("macro_f1", MetricInfo("Macro F1", higher_is_better=True)),),
            needs_classes=True,
        ),
        Metric(
            "calibration",
            "expected calibration error in 15 bins of confidence (Guo et al., 2017)",
            reliability_bins,
            lambda bins: {"calibration_error": calibration_error(bins)},
            infos=(
                (
                    "calibration_error",
                    MetricInfo("Expected calibration error", higher_is_better=False),
                ),
            ),
            needs_classes=True,
        ),
        Metric(
            "confusion",
            "number of examples by class and predicted class",
            confusion_matrix,
            lambda table: {"confusion": table},
            infos=(("confusion", MetricInfo("Confusion matrix", "examples")),),
            needs_classes=True,
        ),
        Metric(
            "fairness",
            "mean of the worst tenth, variance and Gini coefficient of the clients' accuracies",
            from_client_accuracy=lambda accuracy, _: compute_fairness(accuracy),
            infos=(
                ("worst_decile", MetricInfo("Worst decile of clients", "", True, True)),
                (
                    "accuracy_variance",
                    MetricInfo("Variance of clients' accuracies", higher_is_better=False),
                ),
                (
                    "accuracy_gini",
                    MetricInfo("Gini coefficient of clients' accuracies", higher_is_better=False),
                ),
            ),
        ),
        Metric(
            "pooled_accuracy",
            "accuracy over the tests of all clients together, each test example weighted equally",
            from_client_accuracy=lambda accuracy, test_sizes: {
                "pooled_client_accuracy": compute_pooled_accuracy(accuracy, test_sizes)
            },
            infos=(
                (
                    "pooled_client_accuracy",
                    MetricInfo("Pooled accuracy of clients", "", True, True),
                ),
            ),
        ),
        Metric(
            "drift",
            "distance of a round's client updates from their mean: mean cosine and relative "
            "distance",
            update_metric_names=("drift_cosine", "drift_distance"),
            infos=(
                (
                    "drift_cosine",
                    MetricInfo("Cosine of updates and their mean", missing=NOT_TRAINED),
                ),
                (
                    "drift_distance",
                    MetricInfo("Relative distance of updates from their mean", missing=NOT_TRAINED),
                ),
            ),
        ),
        Metric(
            "feature_distance",
            "Frechet distance of each client's images from all images, in a fixed random network; for "
            "images only",
            split_measure_names=("feature_distance", "feature_distance_max"),
            infos=(
                (
                    "split.feature_distance",
                    MetricInfo("Feature distance of clients", missing=UNDEFINED),
                ),
                (
                    "split.feature_distance_max",
                    MetricInfo("Largest feature distance of a client", missing=UNDEFINED),
                ),
            ),
        ),
        Metric(
            "gradient_dissimilarity",
            "FedProx's B^2 and the variance of the clients' gradients at the initial model",
            split_measure_names=("gradient_dissimilarity", "gradient_variance"),
            infos=(
                (
                    "split.gradient_dissimilarity",
                    MetricInfo("Gradient dissimilarity B^2", missing=UNDEFINED),
                ),
                (
                    "split.gradient_variance",
                    MetricInfo("Variance of clients' gradients", missing=UNDEFINED),
                ),
            ),
        ),
    ),
    argument="metrics",
)
"""Metrics by name, including entries that users registered.

Example:
  >>> from fedjax_het.metrics.registry import METRICS
  >>> METRICS["fairness"].description
  "mean of the worst tenth, variance and Gini coefficient of the clients' accuracies"
"""


def get_metric_info(name: str) -> MetricInfo:
    """Return the declaration of a metric.

    Args:
      name: a column of `load_curves` or `load_results`. `final_<metric>` is the mean of the last
        five values of a metric of the setting `metrics`.

    Returns:
      The declaration. A metric without a declaration, for example a user's metric that is not
      registered in this process, has no label, unit and direction.

    Example:
      >>> from fedjax_het.metrics.registry import get_metric_info
      >>> info = get_metric_info("final_calibration_error")
      >>> info.higher_is_better, info.scale
      (False, 1)
      >>> get_metric_info("test_accuracy_photo").axis_label
      'Test accuracy, photo (%)'
    """
    if name in INFOS:
        return INFOS[name]
    for metric in METRICS.values():
        for value_name, info in metric.infos:
            if name == value_name:
                return info
            if name == f"final_{value_name}":
                label = info.label and f"{info.label}, mean of the last five values"
                return info._replace(label=label, missing=UNDEFINED)
    for prefix, info in FAMILY_INFOS.items():
        if name.startswith(prefix):  # the names of domains and clients are the user's
            return info._replace(label=f"{info.label}, {name.removeprefix(prefix)}")
    return MetricInfo(missing=UNDEFINED)


def parse_metrics(text: str | tuple[str, ...] | None) -> tuple[Metric, ...]:
    """Look up the metrics that the setting `metrics` names.

    Args:
      text: names separated by commas, a tuple of names, or None.

    Returns:
      The metrics, in the order of the names.

    Raises:
      ConfigError: if a name is unknown or occurs twice.

    Example:
      >>> from fedjax_het.metrics.registry import parse_metrics
      >>> [metric.name for metric in parse_metrics("calibration, macro_f1")]
      ['calibration', 'macro_f1']
    """
    text = ",".join(text) if isinstance(text, tuple) else text
    names = [name.strip(" ") for name in text.split(",")] if text and text.strip(" ") else []
    metrics = tuple(METRICS.require(name) for name in names)
    require(len(set(names)) == len(names), "metrics", text, "each name once")
    return metrics


@validate_arguments
def register_metric(
    name: str,
    sums: Any,
    finish: Any,
    description: str = "",
    *,
    infos: Mapping[str, MetricInfo] = MappingProxyType({}),
) -> None:
    """Register a metric of the user for runs and sweeps, until the process ends.

    The return values of the functions are checked once a run's classes are known, before anything
    compiles.

    Args:
      name: name of the metric in settings.
      sums: pure JAX function `(logits, labels, mask)` that returns sums over a batch, see
        `Metric.sums`.
      finish: pure JAX function that maps the total of `sums` to arrays by name.
      description: one line for `fedjax-het list`.
      infos: declarations of the values by their names in the result of `finish`. Tables and plots
        show a value without a declaration as it is and mark no best one.

    Raises:
      ConfigError: if the name belongs to a metric of the package or is not an identifier, if
        `sums` or `finish` is not a function, or if another metric declares a value.

    Example:
      >>> import jax
      >>> from fedjax_het import MetricInfo, register_metric
      >>> from fedjax_het.metrics.registry import parse_metrics
      >>> def sum_top_two(logits, labels, mask):
      ...     best = jax.lax.top_k(logits, 2)[1]
      ...     is_correct = (best == labels[:, None]).any(axis=1)
      ...     return {"correct": (is_correct * mask).sum(), "count": mask.sum()}
      >>> register_metric(
      ...     "top_two",
      ...     sum_top_two,
      ...     lambda sums: {"top_two": sums["correct"] / sums["count"]},
      ...     infos={"top_two": MetricInfo("Top-two accuracy", "", True, is_fraction=True)},
      ... )
      >>> len(parse_metrics("top_two, calibration"))  # the setting `metrics`
      2
    """
    for argument, function in (("sums", sums), ("finish", finish)):
        require(callable(function), argument, function, "a function")
    for value_name, info in infos.items():
        validate_fields(info._asdict(), MetricInfo, prefix=f"infos[{value_name!r}].")
        is_free = _is_free(value_name, name)
        require(is_free, "infos", value_name, "a name that no other metric has")
    description = description or "a metric of the user"
    METRICS.add(Metric(name, description, sums, finish, infos=tuple(infos.items())))


def metric_shapes(
    metrics: tuple[Metric, ...],
    output_shape: tuple[int, ...],
    label_shape: tuple[int, ...] = (),
    label_dtype: str = "int32",
) -> dict[str, tuple[int, ...]]:
    """Compute names and shapes of the values of an evaluation, without running it.

    Args:
      metrics: entries of `METRICS`, see `parse_metrics`.
      output_shape: shape of the outputs of one example, such as (C,) of logits.
      label_shape: shape of the label of one example.
      label_dtype: dtype of labels.

    Returns:
      Shapes by name.

    Raises:
      ConfigError: if a function cannot be traced or returns an invalid value, or if a name is
        already used.

    Example:
      >>> from fedjax_het.metrics.registry import metric_shapes, parse_metrics
      >>> metric_shapes(parse_metrics("confusion, macro_f1"), output_shape=(10,))
      {'confusion': (10, 10), 'macro_f1': ()}
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for metric in metrics:
        if metric.sums is None:
            continue
        values = _trace_metric(metric, output_shape, label_shape, label_dtype)
        for name, _ in metric.infos:
            expected = f"a value that finish returns: {', '.join(values)}"
            require(name in values, f"infos of metric {metric.name!r}", name, expected)
        for name, leaf in values.items():
            is_free = name not in shapes and _is_free(name, metric.name)
            expected = "a name that no other metric has"
            require(is_free, f"metric {metric.name!r}", name, expected)
            shapes[name] = tuple(leaf.shape)
    return shapes


_RESERVED_PREFIXES = (
    *("test_", "train_", "client_", "mean_client_", "bytes_"),
    *("update_norm", "drift_", "accuracy_"),
)
_RESERVED_NAMES = ("", "digest", "round")  # the last two are columns of `load_curves`


def _is_free(name: str, metric_name: str) -> bool:
    """Return whether a value of a metric has its own name, also for its mean in the summary."""
    other_metrics = [metric for metric in METRICS.values() if metric.name != metric_name]
    taken = {*_RESERVED_NAMES, *INFOS, *(n for metric in other_metrics for n, _ in metric.infos)}
    return not (name.startswith(_RESERVED_PREFIXES) or taken & {name, f"final_{name}"})


def _trace_metric(
    metric: Metric,
    output_shape: tuple[int, ...],
    label_shape: tuple[int, ...],
    label_dtype: str,
) -> dict[str, Any]:
    shapes = []
    try:
        for num_examples in (2, 3):
            mask = jax.ShapeDtypeStruct((num_examples,), jnp.float32)
            logits = jax.ShapeDtypeStruct((num_examples, *output_shape), jnp.float32)
            labels = jax.ShapeDtypeStruct((num_examples, *label_shape), label_dtype)
            sums = jax.eval_shape(partial(sum_metrics, (metric,)), logits, labels, mask)
            shapes.append([leaf.shape for leaf in jax.tree.leaves(sums)])
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"metric {metric.name!r}: sums returned the shapes {shapes[0]} for 2 examples and "
                f"{shapes[1]} for 3: expected sums over the examples, of one shape for any number"
            )
        return jax.eval_shape(partial(finish_metric, metric), *sums)
    except ConfigError:
        raise
    except Exception as error:  # a user's function may raise anything
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"metric {metric.name!r}: expected sums(logits, labels, mask) and finish(sums) that "
            f"can be traced, but one raises {type(error).__name__}: {first_line}"
        ) from error


def sum_metrics(metrics: tuple[Metric, ...], logits, labels, mask) -> tuple[Tree, ...]:
    """Compute the sums of each metric over a batch.

    Args:
      metrics: metrics of the kind that has `sums`.
      logits: float32 `[B, C]`.
      labels: int32 `[B]`.
      mask: float32 `[B]`, 1 for an example, 0 for padding.

    Returns:
      For each metric, a pytree of float32 arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.metrics.registry import parse_metrics, sum_metrics
      >>> (table,) = sum_metrics(
      ...     parse_metrics("confusion"), jnp.eye(2), jnp.array([0, 1]), jnp.ones(2)
      ... )
      >>> table.tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    sums = tuple(metric.sums(logits, labels, mask) for metric in metrics if metric.sums)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), sums)


def finish_metric(metric: Metric, sums: Tree) -> dict[str, jax.Array]:
    """Compute the values of a metric from the total of its sums.

    Args:
      metric: a metric that has `sums`.
      sums: total of the sums over all batches.

    Returns:
      Float32 arrays by name.

    Raises:
      ConfigError: if `finish` does not return a dict with texts as keys.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.metrics.registry import METRICS, finish_metric
      >>> values = finish_metric(METRICS["macro_f1"], jnp.eye(2))
      >>> float(values["macro_f1"])
      1.0
    """
    assert metric.finish is not None
    values = metric.finish(sums)
    is_dict_of_arrays = isinstance(values, dict) and all(isinstance(name, str) for name in values)
    kind, expected = type(values).__name__, "a dict of arrays by name"
    require(is_dict_of_arrays, f"metric {metric.name!r}", kind, expected)
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
