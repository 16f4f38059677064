"""What runs may measure besides accuracy and loss: sums over examples, of clients' accuracies, and
of what clients send.

    def top_two(logits, labels, known):
        best = jax.lax.top_k(logits, 2)[1]
        return {"right": ((best == labels[:, None]).any(1) * known).sum(), "seen": known.sum()}

    register_measure("top_two", top_two, lambda sums: {"top_two": sums["right"] / sums["seen"]})
    RunSpec("fedavg", measures="top_two, calibration")
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.registry import Registry
from fedjax_het.utils.text import to_one_line
from fedjax_het.utils.validation import validate_arguments

Tree = Any
BatchSumsFunction = Callable[[jax.Array, jax.Array, jax.Array], Tree]
FinishFunction = Callable[[Tree], dict[str, jax.Array]]
NUM_CALIBRATION_BINS = 15  # of the calibration error


class Metric(NamedTuple):
    """A measure; one of the three.

    sums, finish: of the global model on the test images, in every evaluation, on the devices.
      sums(logits [B, C] float32, labels [B] int32, known [B] float32: 1, or 0 for padding) -> a
      pytree of arrays, which is added up over all batches; finish(their total) -> arrays by name.
    of_clients: of the accuracies of clients on their own tests `[rounds, K]`, NaN where there is
      none: -> `[rounds]` by name, in NumPy.
    update_metric_names: names of what is found of what clients send in a round; see `core.drift`.
    """

    name: str
    description: str
    sums: BatchSumsFunction | None = None
    finish: FinishFunction | None = None
    from_client_accuracy: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None
    update_metric_names: tuple[str, ...] = ()


def confusion_matrix(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """[C, C]: images by their class and by what was predicted; NaN where a logit is not finite."""
    num_classes = logits.shape[-1]
    weights = jnp.where(jnp.isfinite(logits).all(-1), mask, jnp.where(mask > 0, jnp.nan, 0.0))
    true_classes = (labels[:, None] == jnp.arange(num_classes)).astype(jnp.float32)
    predicted_classes = (logits.argmax(-1)[:, None] == jnp.arange(num_classes)).astype(jnp.float32)
    return jnp.einsum(
        "bc,bd->cd", true_classes * weights[:, None], predicted_classes, precision="highest"
    )


def class_fractions(table: jax.Array, axis: int) -> jax.Array:
    """Of the diagonal in the sums over an axis; NaN where there is nothing."""
    totals = table.sum(axis)
    return jnp.where(totals > 0, jnp.diagonal(table) / jnp.maximum(totals, 1), jnp.nan)


def macro_f1(table: jax.Array) -> jax.Array:
    """The mean over the classes that are there, or are predicted, of 2 TP / (2 TP + FP + FN)."""
    num_correct = jnp.diagonal(table)
    num_true_or_predicted = table.sum(0) + table.sum(1)
    is_present = num_true_or_predicted > 0
    return (
        jnp.where(is_present, 2 * num_correct / jnp.maximum(num_true_or_predicted, 1), 0)
    ).sum() / is_present.sum()


def reliability_bins(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """[3, BINS]: images, their confidence and how many are right, by confidence."""
    confidence = jax.nn.softmax(logits).max(-1)
    is_correct = (logits.argmax(-1) == labels).astype(jnp.float32)
    # The bins are (0, 1/15], (1/15, 2/15], ...
    bin_index = jnp.clip(
        jnp.ceil(confidence * NUM_CALIBRATION_BINS) - 1, 0, NUM_CALIBRATION_BINS - 1
    )
    bin_mask = (bin_index[:, None] == jnp.arange(NUM_CALIBRATION_BINS)) * mask[:, None]
    nan_if_nonfinite = jnp.where(jnp.isfinite(logits).all(-1) | (mask == 0), 0.0, jnp.nan).sum()
    values = jnp.stack([jnp.ones_like(confidence), confidence, is_correct])
    values = jnp.where(mask > 0, values, 0)
    return jnp.einsum("nb,bk->nk", values, bin_mask, precision="highest") + nan_if_nonfinite


def calibration_error(bins: jax.Array) -> jax.Array:
    """Sum over bins of |right - confidence|, by all images."""
    count, confidence, num_correct = bins
    return jnp.abs(num_correct - confidence).sum() / count.sum()


def _fairness_metrics(accuracy: np.ndarray) -> dict[str, np.ndarray]:
    from fedjax_het.metrics.clients import compute_fairness

    return compute_fairness(accuracy)


METRICS: Registry[Metric] = Registry(
    "measure",
    (
        Metric(
            "class_accuracy",
            "accuracy on the images of each class",
            confusion_matrix,
            lambda table: {"class_accuracy": class_fractions(table, 1)},
        ),
        Metric(
            "macro_f1",
            "unweighted mean of the classes' F1",
            confusion_matrix,
            lambda table: {"macro_f1": macro_f1(table)},
        ),
        Metric(
            "calibration",
            "expected calibration error in 15 bins of confidence (Guo et al., 2017)",
            reliability_bins,
            lambda bins: {"calibration_error": calibration_error(bins)},
        ),
        Metric(
            "confusion",
            "images by class and by what was predicted",
            confusion_matrix,
            lambda table: {"confusion": table},
        ),
        Metric(
            "fairness",
            "over clients' own tests: mean of the worst tenth, variance, Gini coefficient",
            from_client_accuracy=_fairness_metrics,
        ),
        Metric(
            "drift",
            "how far a round's clients go from one another: mean cosine to their mean, relative "
            "distance from it",
            update_metric_names=("drift_cosine", "drift_distance"),
        ),
    ),
    argument="measures",
)


def parse_metrics(text: str | None) -> tuple[Metric, ...]:
    """Those that the setting `measures` names. Raises ConfigError for an unknown name, or one that
    is there twice."""
    names = [name.strip(" ") for name in text.split(",")] if text and text.strip(" ") else []
    metrics = tuple(METRICS.require(name) for name in names)
    require(len(set(names)) == len(names), "measures", text, "each name once")
    return metrics


@validate_arguments
def register_measure(name: str, sums: Any, finish: Any, description: str = "") -> None:
    """Make a measure of one's own known to runs and sweeps, as long as this process lasts.

    sums, finish: see `Metric`, and the example above: pure functions of JAX.
    description: for `fedjax-het list`.

    Raises: ConfigError for a name of the package's own or no word, and for what is no function.
      What they return is checked when a run's classes are known, before anything compiles.
    """
    for argument, function in (("sums", sums), ("finish", finish)):
        require(callable(function), argument, function, "a function")
    METRICS.add(Metric(name, description or "a measure of the user's own", sums, finish))


def metric_shapes(metrics: tuple[Metric, ...], num_classes: int) -> dict[str, tuple[int, ...]]:
    """What is measured in an evaluation, by name, and its shape. Raises ConfigError for functions
    that do not return what they are to, and for names that two of them have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for metric in metrics:
        if metric.sums is None:
            continue
        for name, leaf in _trace_metric(metric, num_classes).items():
            is_free = name not in shapes and not name.startswith(_RESERVED_PREFIXES)
            expected = "a name that nothing else that is measured has"
            require(is_free, f"measure {metric.name!r}", name, expected)
            shapes[name] = tuple(leaf.shape)
    return shapes


_RESERVED_PREFIXES = (
    "test_",
    "train_",
    "client_",
    "mean_client_",
    "bytes_",
    "update_norm",
    "drift_",
)


def _trace_metric(metric: Metric, num_classes: int) -> dict[str, Any]:
    shape = jax.ShapeDtypeStruct
    argument_shapes = (
        shape((2, num_classes), jnp.float32),
        shape((2,), jnp.int32),
        shape((2,), jnp.float32),
    )

    def compute_metric(*arguments):
        return finish_metric(metric, _batch_sums(metric, *arguments))

    try:
        return jax.eval_shape(compute_metric, *argument_shapes)
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's function raises
        description = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        )
        raise ConfigError(
            to_one_line(
                f"measure {metric.name!r}: expected sums(logits, labels, known) and finish(sums) "
                f"that can be traced, but one raises {description}"
            )
        ) from error


def _batch_sums(metric: Metric, logits, labels, mask) -> Tree:
    assert metric.sums is not None
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), metric.sums(logits, labels, mask))


def sum_metrics(metrics: tuple[Metric, ...], logits, labels, mask) -> tuple[Tree, ...]:
    """The sums of a batch, of each."""
    return tuple(_batch_sums(metric, logits, labels, mask) for metric in metrics)


def finish_metric(metric: Metric, sums: Tree) -> dict[str, jax.Array]:
    """What is found of the total."""
    assert metric.finish is not None
    values = metric.finish(sums)
    is_dict_of_arrays = isinstance(values, dict) and all(isinstance(name, str) for name in values)
    require(
        is_dict_of_arrays,
        f"measure {metric.name!r}",
        type(values).__name__,
        "a dict of arrays by name",
    )
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
