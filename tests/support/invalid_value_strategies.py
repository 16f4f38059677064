"""Values that a user may write by mistake, by kind, and what each would mean where it is taken."""

import decimal
import fractions
import inspect
import math
import numbers
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from hypothesis import strategies as st

INVALID = object()  # what a value means that means nothing

TRICKY_TEXTS = (
    "a\nb",
    "\x1b[31mred\x1b[0m",
    "\u202eabc",
    "[/bold]",
    "\r\n",
    "a\tb",
    "x" * 3000,
    "%s{}",
)
_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_scalars = st.one_of(
    st.integers(-9, 9).flatmap(
        lambda n: st.sampled_from([np.int64(n), np.int8(n), np.float32(n / 10), np.float64(n / 10)])
    ),
    st.sampled_from(
        [np.array(3), np.array(0.1), np.bool_(True), np.float32(np.nan), np.str_("fedavg")]
    ),
)


def misspell(word: str) -> st.SearchStrategy[str]:
    """One letter dropped, doubled or changed."""
    positions = st.integers(0, max(0, len(word) - 1))
    return st.one_of(
        positions.map(lambda i: word[:i] + word[i + 1 :]),
        positions.map(lambda i: word[:i] + word[i : i + 1] * 2 + word[i + 1 :]),
        st.tuples(positions, st.sampled_from("qxz9")).map(
            lambda position_and_letter: (
                word[: position_and_letter[0]]
                + position_and_letter[1]
                + word[position_and_letter[0] + 1 :]
            )
        ),
    )


def value_strategies(word: str) -> dict[str, st.SearchStrategy[Any]]:
    """By kind of mistake, values of Python; `word` is one that is right somewhere."""
    small = st.integers(-5, 5)
    return {
        "words for numbers": st.one_of(st.just("auto"), st.floats(-9, 9).map(str), small.map(str)),
        "lists": st.one_of(
            st.lists(small, max_size=3), st.tuples(st.floats(0, 1)), st.just([[word]])
        ),
        "None": st.none(),
        "mappings": st.sampled_from([{}, {"a": 1}, {1: 2}, {word: None}]),
        "truth values": st.booleans(),
        "NumPy scalars": _scalars,
        "NumPy arrays": st.sampled_from(
            [np.ones(3), np.zeros((2, 2)), np.array([]), np.array(["a"]), np.arange(2)]
        ),
        "not finite": st.sampled_from([math.nan, math.inf, -math.inf]),
        "huge": st.sampled_from([1e300, 1e39, -1e300, 10**30, -(10**30), 2**31, 2**63, 10**400]),
        "tiny": st.sampled_from([1e-300, 1e-46, 5e-324, -1e-300]),
        "negative": st.one_of(st.integers(-(10**9), -1), st.floats(-1e9, -1e-3)),
        "zero": st.sampled_from([0, 0.0, -0.0]),
        "fractions": st.floats(0.01, 9).filter(lambda x: x != int(x)),
        "whole numbers": st.integers(1, 9),
        "empty words": st.just(""),
        "misspelt words": misspell(word),
        "other words": _texts,
        "escapes": st.sampled_from(TRICKY_TEXTS),
        "other objects": st.sampled_from(
            [
                *(object(), b"fedavg", 1j, {1}, range(3), len, decimal.Decimal("0.1"), int),
                *(fractions.Fraction(1, 3), np.datetime64("2020-01-01"), Ellipsis),
            ]
        ),
    }


def argument_strategies(word: str) -> dict[str, st.SearchStrategy[list[str]]]:
    """By kind of mistake, what may stand after a flag."""
    single_argument_strategies = {
        kind: strategy.map(lambda value: [str(value)])
        for kind, strategy in value_strategies(word).items()
        if kind not in ("escapes", "empty words", "NumPy scalars", "NumPy arrays", "mappings")
    }
    return single_argument_strategies | {
        "empty words": st.just([""]),
        "escapes": st.sampled_from(TRICKY_TEXTS).map(lambda text: [text]),
        "JSON": st.sampled_from(
            ["[1,2]", "{}", '{"a": 1}', "null", "true", "[" * 9999, "9" * 5000]
        ).map(lambda text: [text]),
        "missing values": st.just([]),
        "several words": st.lists(
            _texts.filter(lambda w: not w.startswith("-")), min_size=2
        ).filter(all),
    }


def to_python_scalar(value: Any) -> Any:
    """Python's own number or word for a scalar of NumPy."""
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if isinstance(value, np.floating) and value.dtype.itemsize < 8:
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def expected_value(value: Any, annotation: Any) -> Any:
    """What a value means where the annotation `kind` stands, or BAD: written from the rules, not
    from the code. Truth values are no numbers, words no lists, fractions no counts."""
    value = to_python_scalar(value)
    low, high, open_low, open_high = -math.inf, math.inf, False, False
    while get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        bounds = [extra for extra in extras if hasattr(extra, "open_low")]
        low, high, open_low, open_high = bounds[0] if bounds else (low, high, open_low, open_high)
    if get_origin(annotation) in (Union, type(int | None)):
        member_values = (expected_value(value, member) for member in get_args(annotation))
        return next(
            (member_value for member_value in member_values if member_value is not INVALID), INVALID
        )
    if get_origin(annotation) is Literal:
        matching_literals = (
            member_value
            for member_value in get_args(annotation)
            if type(member_value) is type(value) and member_value == value
        )
        return next(matching_literals, INVALID)
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
    limit = 2**31 if annotation is int else 3.5e38
    if not (math.isfinite(single_precision) and abs(number) < limit and low <= number <= high):
        return INVALID
    if (open_low and single_precision <= low) or (open_high and single_precision >= high):
        return INVALID
    return int(value) if annotation is int else number


def expected_argument_value(word: str, annotation: Any) -> Any:
    """What one word means on a command line where the annotation `kind` stands, or BAD."""
    if annotation is str or annotation in (Path, Path | None):
        return word
    for parse in (int, float):
        try:
            parsed = expected_value(parse(word), annotation)
        except ValueError:
            continue
        if parsed is not INVALID:
            return parsed
    constants = {"None": None, "True": True, "False": False}
    return expected_value(constants.get(word, word), annotation)


def is_value_in_message(value: Any, message: str) -> bool:
    """Whether a message has the value, or a part of it, or its beginning."""
    value = to_python_scalar(value)
    if isinstance(value, dict):
        elements = [*value, *value.values()]
    else:
        elements = list(value) if isinstance(value, list | tuple | range | np.ndarray) else []
    texts = [repr(value), " ".join(repr(value).split())]
    if inspect.isroutine(value):
        texts.append("a function")
    if isinstance(value, list):
        texts.append(repr(tuple(value)))
    if isinstance(value, np.ndarray):
        texts.append(repr(value.tolist()))
    if isinstance(value, int) and abs(value) < 1e300:
        texts.append(repr(float(value)))
    return any(text[:25] in message for text in texts) or any(
        is_value_in_message(part, message) for part in elements
    )
