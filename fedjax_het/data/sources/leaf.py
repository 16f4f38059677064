"""JSON files of LEAF (Caldas et al., arXiv 1812.01097) by user, such as FEMNIST and Shakespeare."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.data.sources.by_user import USER_ORDER, UserExamples, guess_shape, join_users
from fedjax_het.data.sources.characters import LEAF_CHARACTERS, encode_leaf
from fedjax_het.data.sources.source import Content, Source, list_files
from fedjax_het.data.sources.splits import SplitArrays, TestFraction, load_splits
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, require


def read_leaf(
    location: str,
    cache_dir: Any = None,
    *,
    shape: tuple[PositiveInt, ...] | None = None,
    test_fraction: TestFraction | None = None,
) -> Content:
    """Read images or texts by user from the JSON files of LEAF.

    A file has the keys `users` and `user_data`; the data of a user has lists `x` and `y`. Images
    are lists of pixels; `shape` gives their axes. Texts of one length, such as the 80 characters of
    Shakespeare, have the next character as `y`. It is the class of the text, since LEAF's network
    predicts the character after the last position only.

    Args:
      location: folder of `train/*.json` and `test/*.json`, or of `*.json`; or LEAF's folder with
        these in `data/`.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      shape: (H, W, C) of an image. Default: a square, gray or of three channels.
      test_fraction: fraction of each user's examples that becomes the test split, if there is no
        folder `test`.

    Returns:
      `(arrays, meta)` with users.

    Raises:
      ConfigError: if files are missing or damaged, or if the examples are neither images nor texts.
    """
    splits = _find_files(Path(location))

    def read(chosen: Mapping[str, list[Path]]) -> tuple[SplitArrays, dict[str, Any]]:
        arrays = join_users({s: _iter_users(files, shape) for s, files in chosen.items()})
        is_text = next(iter(arrays.values()))["inputs"].ndim == 2
        characters = [*LEAF_CHARACTERS]
        facts = {"num_tokens": len(characters), "class_names": characters}
        return arrays, facts if is_text else {}

    identity = {split: list_files(files) for split, files in splits.items()}, shape
    arrays, facts = load_splits(
        *("leaf", splits, read, identity, cache_dir),
        test_fraction=test_fraction,
        has_test_option=False,
    )
    return arrays, {**facts, "source": "leaf", "order": USER_ORDER}


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
    raise ConfigError(
        f"{folder} has no known format: expected train/*.json and test/*.json of LEAF"
    )


def _iter_users(paths: list[Path], shape: tuple[int, ...] | None) -> Iterator[UserExamples]:
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
            yield UserExamples(user, *_to_arrays(path, user, x, y, shape))


def _to_arrays(
    path: Path, user: str, x: Any, y: Any, shape: tuple[int, ...] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return images `[N, H, W, C]` or tokens `[N, T]`, and labels `[N]`, of a user."""
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
            "lists of pixels and integers, or texts and characters"
        )
    if values.ndim == 2:
        shape = tuple(shape or guess_shape(path, values.shape[1]))
        size = math.prod(shape)
        require(size == values.shape[1], "shape", shape, f"{values.shape[1]} pixels in all")
        values = values.reshape(len(values), *shape)
    values = values[..., None] if values.ndim == 3 else values
    return values, labels


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
