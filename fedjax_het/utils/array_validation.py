"""Conversion of a user's values to arrays; each error is one line that names the argument."""

from typing import Any

import numpy as np

from fedjax_het.utils.errors import (
    ConfigError,
    display_name,
    make_value_error,
    require,
    summarize_error,
)
from fedjax_het.utils.input_kinds import count_rows

# A network has an output for each class: larger numbers are labels with another meaning.
MAX_CLASSES = 2**16


def to_array(argument: str, values: Any, expected: str) -> np.ndarray:
    """Convert a value to an array.

    Args:
      argument: name of the argument, for messages.
      values: an array, or nested lists of numbers of one shape.
      expected: description of valid values, for messages.

    Returns:
      The array, not of dtype object.

    Raises:
      ConfigError: if the value is no array: ragged lists, generators, texts.
    """
    try:
        array = np.asarray(values)
        if array.dtype != object:
            return array
        cause, reason = None, f"a {type(values).__name__} of objects"
    except Exception as error:  # `__array__` of a user's class may raise anything
        cause, reason = error, summarize_error(error)
    if shapes := _find_mismatched_shapes(values):
        reason = f"items of shapes {shapes[0]} and {shapes[1]}"
    raise ConfigError(f"{argument}: {reason}: expected {expected}") from cause


def to_integers(argument: str, values: Any, expected: str = "integers of rank 1") -> np.ndarray:
    """Convert a value to integers of rank 1.

    Args:
      argument: name of the argument, for messages.
      values: integers `[N]`, or an empty list.
      expected: description of valid values, for messages.

    Returns:
      The integers `[N]`, int64 if there are none.

    Raises:
      ConfigError: if rank or dtype is invalid.
    """
    array = to_array(argument, values, expected)
    if array.shape == (0,):  # NumPy makes an array of floats of an empty list
        return array.astype(np.int64)
    is_valid = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
    require(is_valid, argument, f"{array.dtype} {array.shape}", expected)
    return array


def require_below(argument: str, numbers: np.ndarray, limit: int, kind: str = "label") -> None:
    """Require every number to be in [0, limit).

    Args:
      argument: name of the argument, for messages.
      numbers: integers `[N]`.
      limit: number of valid integers.
      kind: the noun for one entry, for messages: "label", "domain" or "position".

    Raises:
      ConfigError: if a number is negative or too large.
    """
    is_outside = (numbers < 0) | (numbers >= limit)
    if is_outside.any():
        first = int(is_outside.argmax())
        expected = f"a {kind} in [0, {limit})"
        raise make_value_error(f"{argument}[{first}]", int(numbers[first]), expected)


def validate_labels(
    argument: str, labels: Any, inputs_argument: str, inputs: Any, kind: str = "label"
) -> np.ndarray:
    """Check labels: one non-negative integer for each example.

    Args:
      argument: name of the argument, for messages.
      labels: integers `[N]` in [0, 65536).
      inputs_argument: name of the argument of the inputs, for messages.
      inputs: array `[N, ...]` with an entry for each example, or arrays by name.
      kind: the noun for one entry, for messages: "label" or "domain".

    Returns:
      Labels, int32 `[N]`.

    Raises:
      ConfigError: if shape, length, dtype or range is invalid.
    """
    form, name = f"integers [N], a {kind} for each example", display_name(argument)
    labels = to_array(argument, labels, form)
    expected = describe_expected_labels(argument, labels, kind, form)
    if labels.ndim == 2 and labels.shape[1] == 1:
        expected += f", such as {name}.ravel()"
    elif expected == form and labels.dtype.kind in "fb":
        expected += f", such as {name}.astype(int)"
    elif expected == form and labels.dtype.kind in "SU":
        expected += f", such as np.unique({name}, return_inverse=True)[1]"
    labels = to_integers(argument, labels, expected)
    num_examples = count_rows(inputs)
    expected = f"{num_examples}, the length of {display_name(inputs_argument)}"
    require(len(labels) == num_examples, f"len({argument})", len(labels), expected)
    require_below(argument, labels, MAX_CLASSES, kind)
    return np.ascontiguousarray(labels, dtype=np.int32).view()


def describe_expected_labels(argument: str, labels: np.ndarray, kind: str, form: str) -> str:
    """Describe valid labels, with a remedy for matrices and fractions.

    Args:
      argument: name of the argument, for messages.
      labels: the user's labels.
      kind: the noun for one entry, for messages: "label" or "domain".
      form: description of valid labels.

    Returns:
      The description.

    Raises:
      ConfigError: if a label is NaN.
    """
    if labels.ndim == 2:
        is_matrix = labels.shape[1] != 1
        return form + f", such as {display_name(argument)}.argmax(-1)" * is_matrix
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        first = int(np.isnan(labels).argmax())
        raise make_value_error(f"{argument}[{first}]", "nan", f"a {kind}: no missing value")
    has_fractions = labels.dtype.kind == "f" and bool((labels != np.floor(labels)).any())
    return form + ', or the argument task="regression"' * (has_fractions and kind == "label")


def _find_mismatched_shapes(values: Any) -> list[tuple[int, ...]]:
    """Return the first two different shapes among the items, or [] if there are fewer than two."""
    if not isinstance(values, list | tuple | np.ndarray):
        return []
    try:
        shapes = list(dict.fromkeys(map(np.shape, values)))
    except Exception:  # an item is ragged itself
        return []
    return shapes[:2] if len(shapes) > 1 else []
