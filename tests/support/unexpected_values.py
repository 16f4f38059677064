"""Values that nobody meant: one of each kind, and what is certainly wrong for an annotation."""

import collections.abc
import math
import numbers
import os
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pandas as pd


class Unprintable:
    """Whose every answer is an error."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no ==")

    __hash__ = object.__hash__

    def __array__(self, *_, **__):
        raise RuntimeError("no array")


class NotAnnotated:
    """Stands for the annotation of what has none."""


# Kept as long as the process, which removes it and what lies in it at its end.
_SCRATCH_FOLDER = tempfile.TemporaryDirectory(prefix="odd-values-")


def _make_scratch_file() -> Path:
    """One that may be written over."""
    handle, name = tempfile.mkstemp(suffix=".txt", dir=_SCRATCH_FOLDER.name)
    os.close(handle)
    return Path(name)


# Made anew for every use, since a generator is used up.
UNEXPECTED_VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "empty text": lambda: "",
    "word": lambda: "x",
    "number in words": lambda: "1",
    "lines": lambda: "a\nb\x1b[31m",
    "null": lambda: "\0",
    "long": lambda: "x" * 10_000,
    "bytes": lambda: b"1",
    "empty list": list,
    "list": lambda: [1],
    "list of words": lambda: ["x"],
    "list of None": lambda: [None],
    "ragged": lambda: [[1], [1, 2]],
    "tuple": lambda: (1, "x"),
    "empty dict": dict,
    "dict": lambda: {"a": 1},
    "dict by numbers": lambda: {1: 2},
    "set": lambda: {1},
    "True": lambda: True,
    "False": lambda: False,
    "np.bool": lambda: np.True_,
    "np.int64": lambda: np.int64(3),
    "np.float32": lambda: np.float32(0.5),
    "np.str": lambda: np.str_("x"),
    "np.nan": lambda: np.float64("nan"),
    "vector": lambda: np.ones(3),
    "whole vector": lambda: np.arange(3),
    "matrix": lambda: np.ones((2, 2)),
    "0-d": lambda: np.array(2),
    "objects": lambda: np.array([None, "x"], object),
    "zero": lambda: 0,
    "negative": lambda: -1,
    "one": lambda: 1,
    "fraction": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "huge": lambda: 10**30,
    "-huge": lambda: -(10**30),
    "large": lambda: 1e300,
    "tiny": lambda: 1e-300,
    "complex": lambda: 1j,
    "object": object,
    "generator": lambda: (i for i in range(3)),
    "unprintable": Unprintable,
    "list of unprintables": lambda: [Unprintable()],
    "function": lambda: lambda: None,
    "class": lambda: int,
    "no folder": lambda: Path("/nowhere/at/all"),
    "file": _make_scratch_file,
    "frame": pd.DataFrame,
    "another frame": lambda: pd.DataFrame({"a": [1, 2]}),
}


def is_certainly_invalid(value: Any, annotation: Any) -> bool:
    """Whether an annotation rules a value out: of arrays and lists of numbers it says little."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = get_args(annotation)
        if any((get_origin(member) or member) in (os.PathLike, Path) for member in members):
            members = (Path, *(member for member in members if member is types.NoneType))
        return all(is_certainly_invalid(value, member) for member in members)
    origin, items = get_origin(annotation), get_args(annotation)
    if annotation in (Any, np.ndarray, NotAnnotated) or getattr(annotation, "_is_protocol", False):
        return False
    if annotation is types.NoneType:
        return value is not None
    if origin is Annotated:
        return _out_of_bounds(value, items[0], items[1])
    if origin is Literal:
        return not (isinstance(value, str) and value in items)
    if annotation is bool:
        return not isinstance(value, bool | np.bool_)
    if annotation in (int, float):
        return not _is_number(value, annotation) or not abs(_to_python_scalar(value)) < (
            2**31 if annotation is int else 3e38
        )
    if annotation is str:
        return not isinstance(value, str)
    if annotation is Path:
        return not isinstance(value, str | os.PathLike) or str(value) == "" or "\0" in str(value)
    if annotation is Callable or origin is collections.abc.Callable:
        return not callable(value)
    if origin in (collections.abc.Sequence, collections.abc.Iterable, list, tuple):
        return _is_invalid_sequence(value, origin, items)
    if origin in (Mapping, dict) or annotation is dict:
        return not isinstance(value, Mapping)
    return isinstance(annotation, type) and not isinstance(value, annotation)


def _to_python_scalar(value: Any) -> Any:
    """A scalar of NumPy as Python's."""
    return value.item() if getattr(value, "shape", None) == () else value


def _is_number(value: Any, kind: type) -> bool:
    value = _to_python_scalar(value)
    number_type = numbers.Integral if kind is int else numbers.Real
    return isinstance(value, number_type) and not isinstance(value, bool)


def _out_of_bounds(value: Any, kind: type, bounds: Any) -> bool:
    has_upper_bound = kind is int and not math.isinf(bounds.high)  # then by these alone
    if not _is_number(value, kind) or (not has_upper_bound and is_certainly_invalid(value, kind)):
        return True
    return not bounds.low <= value <= bounds.high


def _is_invalid_sequence(value: Any, origin: Any, items: tuple[Any, ...]) -> bool:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return True
    ordered = hasattr(value, "__len__") and not isinstance(value, Mapping | set)
    if (origin is collections.abc.Sequence and not ordered) or getattr(value, "shape", None) == ():
        return True
    has_class_items = (
        items and isinstance(items[0], type) and items[0] not in (int, float, np.ndarray)
    )
    if not (has_class_items and hasattr(value, "__len__")):
        return False
    return any(not isinstance(item, items[0]) for item in value)
