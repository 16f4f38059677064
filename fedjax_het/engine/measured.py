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

from fedjax_het.common.doors import door
from fedjax_het.common.errors import ConfigError, require
from fedjax_het.common.registry import Registry
from fedjax_het.common.text import one_line

Tree = Any
Sums = Callable[[jax.Array, jax.Array, jax.Array], Tree]
Finish = Callable[[Tree], dict[str, jax.Array]]
BINS = 15  # of the calibration error


class Measure(NamedTuple):
    """A measure; one of the three.

    sums, finish: of the global model on the test images, in every evaluation, on the devices.
      sums(logits [B, C] float32, labels [B] int32, known [B] float32: 1, or 0 for padding) -> a
      pytree of arrays, which is added up over all batches; finish(their total) -> arrays by name.
    of_clients: of the accuracies of clients on their own tests `[rounds, K]`, NaN where there is
      none: -> `[rounds]` by name, in NumPy.
    of_uploads: names of what is found of what clients send in a round; see `engine.drift`.
    """

    name: str
    description: str
    sums: Sums | None = None
    finish: Finish | None = None
    of_clients: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None
    of_uploads: tuple[str, ...] = ()


def by_class(logits: jax.Array, labels: jax.Array, known: jax.Array) -> jax.Array:
    """[C, C]: images by their class and by what was predicted; NaN where a logit is not finite."""
    classes = logits.shape[-1]
    ok = jnp.where(jnp.isfinite(logits).all(-1), known, jnp.where(known > 0, jnp.nan, 0.0))
    true = (labels[:, None] == jnp.arange(classes)).astype(jnp.float32)
    said = (logits.argmax(-1)[:, None] == jnp.arange(classes)).astype(jnp.float32)
    return jnp.einsum("bc,bd->cd", true * ok[:, None], said, precision="highest")


def class_shares(table: jax.Array, over: int) -> jax.Array:
    """Of the diagonal in the sums over an axis; NaN where there is nothing."""
    totals = table.sum(over)
    return jnp.where(totals > 0, jnp.diagonal(table) / jnp.maximum(totals, 1), jnp.nan)


def macro_f1(table: jax.Array) -> jax.Array:
    """The mean over the classes that are there, or are predicted, of 2 TP / (2 TP + FP + FN)."""
    right = jnp.diagonal(table)
    either = table.sum(0) + table.sum(1)
    seen = either > 0
    return (jnp.where(seen, 2 * right / jnp.maximum(either, 1), 0)).sum() / seen.sum()


def in_bins(logits: jax.Array, labels: jax.Array, known: jax.Array) -> jax.Array:
    """[3, BINS]: images, their confidence and how many are right, by confidence."""
    confidence = jax.nn.softmax(logits).max(-1)
    right = (logits.argmax(-1) == labels).astype(jnp.float32)
    # The bins are (0, 1/15], (1/15, 2/15], ...
    place = jnp.clip(jnp.ceil(confidence * BINS) - 1, 0, BINS - 1)
    member = (place[:, None] == jnp.arange(BINS)) * known[:, None]
    bad = jnp.where(jnp.isfinite(logits).all(-1) | (known == 0), 0.0, jnp.nan).sum()
    values = jnp.stack([jnp.ones_like(confidence), confidence, right])
    values = jnp.where(known > 0, values, 0)
    return jnp.einsum("nb,bk->nk", values, member, precision="highest") + bad


def calibration_error(bins: jax.Array) -> jax.Array:
    """Sum over bins of |right - confidence|, by all images."""
    count, confidence, right = bins
    return jnp.abs(right - confidence).sum() / count.sum()


def _fairness(accuracy: np.ndarray) -> dict[str, np.ndarray]:
    from fedjax_het.engine.fairness import fairness

    return fairness(accuracy)


MEASURES: Registry[Measure] = Registry(
    "measure",
    (
        Measure(
            "class_accuracy",
            "accuracy on the images of each class",
            by_class,
            lambda table: {"class_accuracy": class_shares(table, 1)},
        ),
        Measure(
            "macro_f1",
            "unweighted mean of the classes' F1",
            by_class,
            lambda table: {"macro_f1": macro_f1(table)},
        ),
        Measure(
            "calibration",
            "expected calibration error in 15 bins of confidence (Guo et al., 2017)",
            in_bins,
            lambda bins: {"calibration_error": calibration_error(bins)},
        ),
        Measure(
            "confusion",
            "images by class and by what was predicted",
            by_class,
            lambda table: {"confusion": table},
        ),
        Measure(
            "fairness",
            "over clients' own tests: mean of the worst tenth, variance, Gini coefficient",
            of_clients=_fairness,
        ),
        Measure(
            "drift",
            "how far a round's clients go from one another: mean cosine to their mean, relative "
            "distance from it",
            of_uploads=("drift_cosine", "drift_distance"),
        ),
    ),
    argument="measures",
)


def chosen(text: str | None) -> tuple[Measure, ...]:
    """Those that the setting `measures` names. Raises ConfigError for an unknown name, or one that
    is there twice."""
    names = [name.strip(" ") for name in text.split(",")] if text and text.strip(" ") else []
    found = tuple(MEASURES.require(name) for name in names)
    require(len(set(names)) == len(names), "measures", text, "each name once")
    return found


@door
def register_measure(name: str, sums: Any, finish: Any, description: str = "") -> None:
    """Make a measure of one's own known to runs and sweeps, as long as this process lasts.

    sums, finish: see `Measure`, and the example above: pure functions of JAX.
    description: for `fedjax-het list`.

    Raises: ConfigError for a name of the package's own or no word, and for what is no function.
      What they return is checked when a run's classes are known, before anything compiles.
    """
    for argument, function in (("sums", sums), ("finish", finish)):
        require(callable(function), argument, function, "a function")
    MEASURES.add(Measure(name, description or "a measure of the user's own", sums, finish))


def shapes_of(measures: tuple[Measure, ...], num_classes: int) -> dict[str, tuple[int, ...]]:
    """What is measured in an evaluation, by name, and its shape. Raises ConfigError for functions
    that do not return what they are to, and for names that two of them have."""
    found: dict[str, tuple[int, ...]] = {}
    for measure in measures:
        if measure.sums is None:
            continue
        for name, leaf in _traced(measure, num_classes).items():
            free = name not in found and not name.startswith(_TAKEN)
            expected = "a name that nothing else that is measured has"
            require(free, f"measure {measure.name!r}", name, expected)
            found[name] = tuple(leaf.shape)
    return found


_TAKEN = ("test_", "train_", "client_", "mean_client_", "bytes_", "update_norm", "drift_")


def _traced(measure: Measure, num_classes: int) -> dict[str, Any]:
    shape = jax.ShapeDtypeStruct
    given = (
        shape((2, num_classes), jnp.float32),
        shape((2,), jnp.int32),
        shape((2,), jnp.float32),
    )

    def once(*given):
        return finished(measure, _added(measure, *given))

    try:
        return jax.eval_shape(once, *given)
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's function raises
        what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        raise ConfigError(
            one_line(
                f"measure {measure.name!r}: expected sums(logits, labels, known) and finish(sums) "
                f"that can be traced, but one raises {what}"
            )
        ) from error


def _added(measure: Measure, logits, labels, known) -> Tree:
    assert measure.sums is not None
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), measure.sums(logits, labels, known))


def added(measures: tuple[Measure, ...], logits, labels, known) -> tuple[Tree, ...]:
    """The sums of a batch, of each."""
    return tuple(_added(measure, logits, labels, known) for measure in measures)


def finished(measure: Measure, sums: Tree) -> dict[str, jax.Array]:
    """What is found of the total."""
    assert measure.finish is not None
    found = measure.finish(sums)
    named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    require(named, f"measure {measure.name!r}", type(found).__name__, "a dict of arrays by name")
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}
