"""Checks of the functions of a user's kind of task: shapes and types, before anything compiles."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.tasks.base import TaskKind
from fedjax_het.utils.errors import ConfigError, describe_error, is_integer_at_least, require
from fedjax_het.utils.input_kinds import count_rows

_LABEL_TYPES = ("int32", "float32")


def convert_labels(
    kind: type[TaskKind], argument: str, labels: object, inputs_argument: str, inputs: Any
) -> np.ndarray:
    """Check labels by a kind of task, and check the array that the kind returns.

    Args:
      kind: the kind.
      argument: name of the argument of the labels, for messages.
      labels: the user's labels.
      inputs_argument: name of the argument of the inputs, for messages.
      inputs: the checked inputs of the examples, `[N, ...]`, or arrays by name.

    Returns:
      Labels `[N, ...]`, int32 or float32.

    Raises:
      ConfigError: if the labels are invalid, or if the kind returns another array.
    """
    array = kind.validate_labels(argument, labels, inputs_argument, inputs)
    num_examples = count_rows(inputs)
    is_array = isinstance(array, np.ndarray) and array.shape[:1] == (num_examples,)
    if not is_array or str(array.dtype) not in _LABEL_TYPES:
        raise ConfigError(
            f"task {kind.name!r}: validate_labels returned {_describe(array)} for {argument}: "
            f"expected an array of NumPy, int32 or float32, of {num_examples} labels"
        )
    return array


def count_outputs(kind: type[TaskKind], labels: np.ndarray, num_tokens: int | None) -> int:
    """Return the number of outputs that a kind of task counts.

    Args:
      kind: the kind.
      labels: checked training labels.
      num_tokens: number of different tokens of the inputs, or None.

    Returns:
      The number.

    Raises:
      ConfigError: if the kind returns no positive integer.
    """
    number = kind.count_outputs(labels, num_tokens)
    is_valid = is_integer_at_least(number, 1)
    require(is_valid, f"task {kind.name!r}: count_outputs", number, "an integer of at least 1")
    return int(number)


def make_kind(kind: type[TaskKind], labels: np.ndarray) -> TaskKind:
    """Return a kind of task with the constants of test labels.

    Args:
      kind: the kind.
      labels: checked test labels, `[N, ...]`.

    Returns:
      The object of the kind.

    Raises:
      ConfigError: if the kind returns another object, or one that is no static value.
    """
    made = kind.from_labels(labels)
    is_valid = isinstance(made, TaskKind) and _is_hashable(made)
    expected = f"a {kind.__name__} with fields that have a hash, such as tuples of floats"
    require(is_valid, f"task {kind.name!r}: from_labels", made, expected)
    return made


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def check_functions(
    kind: TaskKind, output_shape: tuple[int, ...], label_shape: tuple[int, ...], label_dtype: str
) -> None:
    """Check the losses, scores and weights of a kind of task by shapes alone.

    Cost: four abstract evaluations for each combination of arguments. Nothing compiles.

    Args:
      kind: the kind.
      output_shape: shape of the outputs of one example, such as (C,).
      label_shape: shape of the label of one example.
      label_dtype: type of the labels.

    Raises:
      ConfigError: if a function fails, or returns anything but a number for each example; or if the
        losses have no gradient.

    Example:
      >>> from fedjax_het.tasks import TASKS
      >>> from fedjax_het.tasks.checks import check_functions
      >>> check_functions(TASKS["regression"].make(), (3,), (3,), "float32")
    """
    # Another number than the other sizes, so that no other axis is taken for the examples.
    num_examples = next(n for n in range(2, 100) if n not in (*output_shape, *label_shape))
    outputs = jax.ShapeDtypeStruct((num_examples, *output_shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((num_examples, *label_shape), label_dtype)

    def check(name: str, noun: str, *arguments: Any) -> None:
        result = _evaluate(kind, name, getattr(kind, name), *arguments)
        is_valid = getattr(result, "shape", None) == (num_examples,)
        if not is_valid or not _is_number(result):
            shapes = ", ".join(map(_describe, arguments))
            raise ConfigError(
                f"task {kind.name!r}: {name} returned {_describe(result)} for {shapes}: expected "
                f"float32[{num_examples}], the {noun} of each of {num_examples} examples"
            )

    check("compute_losses", "loss", outputs, labels)
    check("compute_scores", "score", outputs, labels)
    check("count_targets", "weight", labels)

    def compute_mean_loss(outputs: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean(kind.compute_losses(outputs, labels), dtype=jnp.float32)

    _evaluate(kind, "the gradient of compute_losses", jax.grad(compute_mean_loss), outputs, labels)


def _evaluate(kind: TaskKind, name: str, function: Callable, *arguments: Any) -> Any:
    """Return shapes and types of a function's result."""
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:  # a user's function may raise anything
        shapes = ", ".join(map(_describe, arguments))
        reason = describe_error(error)[:300]
        raise ConfigError(
            f"task {kind.name!r}: {name} fails for {shapes} ({reason}): expected a pure function "
            "of jax arrays"
        ) from error


def _is_number(result: Any) -> bool:
    return result.dtype == bool or jnp.issubdtype(result.dtype, jnp.number)


def _describe(value: Any) -> str:
    """Return type and shape of an array, such as `float32[4,3]`, or the type of another value."""
    if value is None:
        return "None"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return f"a {type(value).__name__}"
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
