"""Meaning of a value for an annotation, written from the rules and not from the code."""

import math
import numbers
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

INVALID = object()  # meaning of a value that cannot be used


def to_python_scalar(value: Any) -> Any:
    """Return Python's own number or word for a scalar of NumPy."""
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if isinstance(value, np.floating) and value.dtype.itemsize < 8:
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def expected_value(value: Any, annotation: Any) -> Any:
    """Return the meaning of a value for an annotation, or INVALID.

    Truth values are no numbers, words no lists, fractions no counts.
    """
    value = to_python_scalar(value)
    low, high, open_low, open_high = -math.inf, math.inf, False, False
    while get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        bounds = [extra for extra in extras if hasattr(extra, "open_low")]
        low, high, open_low, open_high = bounds[0] if bounds else (low, high, open_low, open_high)
    if get_origin(annotation) in (Union, type(int | None)):
        member_values = (expected_value(value, member) for member in get_args(annotation))
        return next((member for member in member_values if member is not INVALID), INVALID)
    if get_origin(annotation) is Literal:
        literals = (x for x in get_args(annotation) if type(x) is type(value) and x == value)
        return next(literals, INVALID)
    if get_origin(annotation) is tuple:
        is_array = isinstance(value, np.ndarray) and value.ndim > 0
        if not (is_array or isinstance(value, list | tuple | range)):
            return INVALID
        items = [expected_value(item, get_args(annotation)[0]) for item in value]
        return INVALID if any(item is INVALID for item in items) else items
    if annotation is type(None):
        return None if value is None else INVALID
    if annotation in (bool, str):
        return value if isinstance(value, annotation) else INVALID
    if get_origin(annotation) is dict or annotation is dict:
        is_string_keyed = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        return value if is_string_keyed else INVALID
    number_type = numbers.Integral if annotation is int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, number_type):
        return INVALID
    try:
        number = float(value)
        with np.errstate(over="ignore"):
            single_precision = float(np.float32(number))
    except OverflowError:
        return INVALID
    single_precision = 0.0 if abs(single_precision) < 2.0**-126 else single_precision
    if annotation is int:
        in_range = not math.isinf(high) or abs(number) < 2**31
    else:
        in_range = math.isfinite(single_precision) and abs(number) < 3.5e38
    if not (in_range and low <= number <= high):
        return INVALID
    if (open_low and single_precision <= low) or (open_high and single_precision >= high):
        return INVALID
    return int(value) if annotation is int else number
