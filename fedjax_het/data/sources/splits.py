"""Training and test splits of data that have splits of other names, or none."""

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar

import numpy as np

from fedjax_het.data.array_cache import load_or_build_arrays
from fedjax_het.data.sampling import shuffle_by_class
from fedjax_het.data.sources.source import Content
from fedjax_het.tasks import TASKS
from fedjax_het.utils.config import Bounds
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.input_kinds import take_rows

TestFraction = Annotated[float, Bounds(0, 1, open_low=True, open_high=True)]
_TEST_NAMES = ("test", "validation", "valid", "val")
_SEED = 0  # never changed: another value would be another benchmark


_log = logging.getLogger("fedjax_het")
SplitArrays = dict[str, dict[str, np.ndarray]]
"""Arrays `inputs`, `labels` and others by the name of the split."""
SplitT = TypeVar("SplitT")


def load_splits(
    format_name: str,
    splits: Mapping[str, SplitT],
    read: Callable[[Mapping[str, SplitT]], tuple[SplitArrays, dict[str, Any]]],
    identity: Any,
    cache_dir: str | os.PathLike | None,
    *,
    train: str = "train",
    test: str | None = None,
    test_fraction: float | None = None,
    has_test_option: bool = True,
) -> Content:
    """Read the splits for training and test through the cache.

    Args:
      format_name: name of the source, the first part of the name of the cache file.
      splits: locations of all splits by name.
      read: function of the locations of some splits that returns their arrays and facts.
      identity: object whose representation identifies the contents of the splits and the options.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      train: name of the training split, see `choose_splits`.
      test: name of the test split.
      test_fraction: fraction of the training split that is drawn as the test split, or None.
      has_test_option: whether the user can name the test split.

    Returns:
      `(arrays, meta)`.

    Raises:
      ConfigError: if a split is missing, or if `read` raises it.
    """
    divides = test_fraction is not None
    arguments = (splits, train, test)
    train, test = choose_splits(*arguments, divides=divides, has_test_option=has_test_option)

    def build() -> Content:
        arrays, meta = read({name: splits[name] for name in (train, test) if name is not None})
        return join_splits(arrays, train, test, test_fraction, meta.get("task")), meta

    text = repr((identity, train, test, test_fraction))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return load_or_build_arrays(f"{format_name}-{digest[:16]}", digest, build, cache_dir)


def join_splits(
    arrays: SplitArrays,
    train: str = "train",
    test: str | None = "test",
    test_fraction: float | None = None,
    task: str | None = None,
) -> dict[str, np.ndarray]:
    """Return the arrays of both splits under one name each; see `load_splits` for the arguments.

    Args:
      arrays: arrays of the splits.
      train: name of the training split.
      test: name of the test split; None: the training split is divided.
      test_fraction: fraction of the test split, for a split that is divided.
      task: kind of the task; None: classification.

    Returns:
      Arrays by name, with `train_` or `test_` before the names.
    """
    if test is None:
        return divide_examples(arrays[train], test_fraction or 0.0, task)
    named = {f"train_{kind}": array for kind, array in arrays[train].items()}
    return named | {f"test_{kind}": array for kind, array in arrays[test].items()}


def choose_splits(
    names: Collection[str],
    train: str = "train",
    test: str | None = None,
    *,
    divides: bool = False,
    has_test_option: bool = True,
) -> tuple[str, str | None]:
    """Choose the splits for training and test.

    Args:
      names: names of the splits.
      train: name of the training split. If there is only one split, it is this one.
      test: name of the test split. Default: "test", or else a validation split.
      divides: whether the training split is divided, so that no test split is needed.
      has_test_option: whether the user can name the test split, for messages.

    Returns:
      Names of the training split and of the test split; the latter is None if `divides`.

    Raises:
      ConfigError: if a split is missing.
    """
    text = ", ".join(names) or "none"
    if len(names) == 1 and not {*names} & {*_TEST_NAMES}:
        train = next(iter(names))
    if train not in names:
        expected = ": expected train=SPLIT" if has_test_option else ""
        raise ConfigError(f"no split {train!r} (splits: {text}){expected}")
    if divides:
        if unused := [name for name in _TEST_NAMES if name in names and name != train]:
            _log.warning("note: test_fraction divides the split %r; not used: %r", train, unused[0])
        return train, None
    candidates = _TEST_NAMES if test is None else (test,)
    chosen = next((name for name in candidates if name in names), None)
    if chosen is not None and chosen == train:
        raise ConfigError(f"test = {test!r} is the training split: expected another split")
    if chosen is None:
        expected = "test=SPLIT, or test_fraction=0.2" if has_test_option else "test_fraction=0.2"
        raise ConfigError(
            f"no split {candidates[0]!r} for tests (splits: {text}): expected {expected} to divide "
            "the training split"
        )
    return train, chosen


def divide_examples(
    arrays: dict[str, np.ndarray], test_fraction: float, task: str | None = None
) -> dict[str, np.ndarray]:
    """Draw test examples from all examples, with a fixed seed.

    A fraction of the examples of each user is drawn, rounded; without users, of each class. Without
    users and classes, a fraction of all examples is drawn.

    Args:
      arrays: `inputs`, `labels` and optional arrays of equal length, such as `users`.
      test_fraction: fraction of the test examples.
      task: kind of the task; None: classification for labels that are whole numbers.

    Returns:
      Arrays by name, with `train_` or `test_` before the names. Examples keep their order.

    Raises:
      ConfigError: if a split would be empty.
    """
    rng = np.random.default_rng(_SEED)
    labels = arrays["labels"]
    has_classes = task is None or TASKS[task].make.has_classes
    has_classes = has_classes and labels.dtype.kind in "iuU" and labels.ndim == 1
    strata = labels if has_classes else np.zeros(len(labels), int)
    names, groups = np.unique(arrays.get("users", strata), return_inverse=True)
    is_test = np.zeros(len(groups), bool)
    for members in shuffle_by_class(rng, groups, len(names)):
        is_test[members[: round(test_fraction * len(members))]] = True
    if is_test.all() or not is_test.any():
        split, change = ("training", "smaller") if is_test.all() else ("test", "larger")
        found, expected = f"{len(labels)} examples", f"a {change} one"
        if "users" in arrays:
            found += f" with {len(names)} clients"
        elif has_classes:
            found += f" with {len(names)} labels"
            expected += ', or task="regression" if labels are numbers'
        raise ConfigError(
            f"test_fraction = {test_fraction:g} leaves no {split} example of {found}: "
            f"expected {expected}"
        )
    divided: dict[str, Any] = {}
    for split, rows in (("train", ~is_test), ("test", is_test)):
        divided |= {f"{split}_{name}": take_rows(value, rows) for name, value in arrays.items()}
    return divided
