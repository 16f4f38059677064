"""JSON files of LEAF (Caldas et al., arXiv 1812.01097) by user, such as FEMNIST and Shakespeare."""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.data.sources.by_user import (
    USER_ORDER,
    UserExamples,
    guess_shape,
    join_users,
    to_levels,
)
from fedjax_het.data.sources.characters import LEAF_CHARACTERS, encode_leaf
from fedjax_het.data.sources.source import Content, Source, list_files, require_folder
from fedjax_het.data.sources.splits import SplitArrays, TestFraction, load_splits
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, require

_log = logging.getLogger("fedjax_het")


def read_leaf(
    location: str,
    cache_dir: Any = None,
    *,
    shape: tuple[PositiveInt, ...] | PositiveInt | None = None,
    test_fraction: TestFraction | None = None,
) -> Content:
    """Read images, features, series or texts by user from the JSON files of LEAF.

    A file has the keys `users` and `user_data`; the data of a user has lists `x` and `y`. Lists of
    pixels are images, and other lists of numbers features, as FedProx's synthetic data have them.
    Texts of one length, such as the 80 characters of Shakespeare, have the next character as `y`.
    It is the class of the text, since LEAF's network predicts the character after the last position
    only.

    Args:
      location: folder of `train/*.json` and `test/*.json`, or of `*.json`; or LEAF's folder with
        these in `data/`.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      shape: [H,W,C] of an image, [T,F] of a series, or [F] of features. Default: a square image,
        gray or of three channels, if all values of all users are integers in 0..255, or these
        divided by 255; otherwise features, or series for nested lists.
      test_fraction: fraction of each user's examples that becomes the test split, if there is no
        folder `test`.

    Returns:
      `(arrays, meta)` with users.

    Raises:
      ConfigError: if files are missing or damaged, or if the examples are neither numbers nor
        texts.
    """
    splits = _find_files(Path(location))
    shape = (shape,) if isinstance(shape, int) else shape

    def read(chosen: Mapping[str, list[Path]]) -> tuple[SplitArrays, dict[str, Any]]:
        users = {split: [*_iter_users(files)] for split, files in chosen.items()}
        arrays = join_users(_to_examples(users, shape))
        is_text = next(iter(arrays.values()))["inputs"].dtype == np.int32
        characters = [*LEAF_CHARACTERS]
        facts = {"num_tokens": len(characters), "class_names": characters}
        return arrays, facts if is_text else {}

    identity = {split: list_files(files) for split, files in splits.items()}, shape
    arrays, facts = load_splits(
        *("leaf", splits, read, identity, cache_dir),
        test_fraction=test_fraction,
        has_test_option=False,
    )
    return arrays, {**facts, "source": "leaf", "order": USER_ORDER, "channels": "last"}


def _find_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split; files without splits are training files."""
    for root in (folder, folder / "data"):
        splits = {split: sorted((root / split).glob("*.json")) for split in ("train", "test")}
        splits = {split: paths for split, paths in splits.items() if paths}
        if splits:
            return splits
        for files in (root / "all_data", root):
            if paths := sorted(files.glob("*.json")):
                return {"train": paths}
    require_folder(folder)
    raise ConfigError(
        f"{folder} has no known format: expected train/*.json and test/*.json of LEAF"
    )


def _iter_users(paths: list[Path]) -> Iterator[UserExamples]:
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
            data = [(str(user), content["user_data"][user]) for user in content["users"]]
            rows = [(user, each["x"], each["y"]) for user, each in data]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ConfigError(
                f"{path} cannot be read ({reason}): expected users and user_data with x and y"
            ) from error
        for user, x, y in rows:
            yield UserExamples(user, *_to_arrays(path, user, x, y))


def _to_arrays(path: Path, user: str, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers `[N, ...]` or tokens `[N, T]`, and labels `[N]`, of a user."""
    try:
        values, labels = np.array(x), np.array(y, dtype=np.int64 if not len(y) else None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: x or y of user {user!r} are no arrays ({error})") from error
    if labels.dtype.kind == "f" and (labels == np.rint(labels)).all():
        labels = labels.astype(np.int64)  # FedProx's files have the labels 0.0, 1.0, ...
    if not len(labels):
        return np.zeros((0, 1, 1, 1), np.uint8), labels
    if values.dtype.kind == labels.dtype.kind == "U" and values.ndim == labels.ndim == 1:
        try:
            return encode_leaf(values), _to_classes(labels)
        except ValueError as error:
            raise ConfigError(f"{path}: x or y of user {user!r}: {error}") from error
    is_valid = values.dtype.kind in "iuf" and labels.dtype.kind in "iu" and labels.ndim == 1
    if not is_valid:
        raise ConfigError(
            f"{path}: x and y of user {user!r} are {values.dtype} and {labels.dtype}: expected "
            "lists of numbers and integers, or texts and characters"
        )
    return values, labels


def _to_examples(
    users: dict[str, list[UserExamples]], shape: tuple[int, ...] | None
) -> dict[str, list[UserExamples]]:
    """Return the numbers of all users in the shape of images, series or features."""
    arrays = [inputs for split in users.values() for _, inputs, labels in split if len(labels)]
    if not arrays or arrays[0].dtype == np.int32:  # tokens
        require(shape is None or not arrays, "shape", shape, "no value, as the inputs are texts")
        return users
    shape = shape or _guess_shape(arrays)
    size = math.prod(arrays[0].shape[1:])
    require(math.prod(shape) == size, "shape", shape, f"{size} numbers in all")

    def convert(each: UserExamples) -> UserExamples:
        if not len(each.labels) or math.prod(each.inputs.shape[1:]) != size:
            return each  # `join_users` reports another shape
        inputs = each.inputs if len(shape) == 3 else each.inputs.astype(np.float32)
        return each._replace(inputs=inputs.reshape(-1, *shape))

    return {split: [convert(each) for each in own] for split, own in users.items()}


def _guess_shape(arrays: list[np.ndarray]) -> tuple[int, ...]:
    """Return the shape of images if all values are levels of pixels, else of series or features."""
    shape = arrays[0].shape[1:]
    if not shape:
        return (1,)
    is_flat = len(shape) == 1
    image_shape = guess_shape(*shape) if is_flat else (*shape, 1)[:3]
    if image_shape is None:
        return shape
    numbers = ("features" if is_flat else "series"), shape
    images = "images", image_shape
    is_image = all(to_levels(array) is not None for array in arrays)
    (noun, chosen), (other, other_shape) = (images, numbers) if is_image else (numbers, images)
    option = ",".join(map(str, other_shape))
    _log.warning("note: x has %s %s; shape=[%s] makes %s of them", noun, chosen, option, other)
    return chosen


def _to_classes(characters: np.ndarray) -> np.ndarray:
    """Return the position of each character, int64 `[N]`."""
    tokens = encode_leaf(characters)
    if tokens.shape[1] != 1:
        raise ValueError(f"labels have {tokens.shape[1]} characters: expected one")
    return tokens[:, 0].astype(np.int64)


SOURCE = Source(
    "leaf",
    "leaf:FOLDER, JSON files of LEAF by user, such as FEMNIST and Shakespeare",
    read=read_leaf,
)
