"""Files of TensorFlow Federated by user, HDF5 and SQLite: FEMNIST, CIFAR-100, Shakespeare."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.data.sources.by_user import USER_ORDER, UserExamples, guess_shape, join_users
from fedjax_het.data.sources.characters import TFF_NUM_TOKENS, encode_snippets
from fedjax_het.data.sources.source import READ_ERRORS, Content, Source, list_files
from fedjax_het.data.sources.splits import SplitArrays, TestFraction, load_splits
from fedjax_het.utils.errors import ConfigError, summarize_error

_IMAGES, _LABELS = ("pixels", "image"), ("label",)  # FEMNIST, CIFAR-100
_TEXT = "snippets"  # Shakespeare
_SQLITE = ".sqlite"
_QUERY = """SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ?
ORDER BY client_id, rowid"""


def read_tff(
    location: str,
    cache_dir: Any = None,
    *,
    image: str | None = None,
    label: str | None = None,
    test_fraction: TestFraction | None = None,
) -> Content:
    """Read images or texts by user from the files of TensorFlow Federated.

    An HDF5 file has a group `examples` with a group for each user, which has an array for each
    column. An SQLite file has a table `examples` with the user, the split and the serialized
    columns of each example. Texts are the column `snippets`, see `characters.encode_snippets`.

    Args:
      location: a file `*_train.h5` beside which there is `*_test.h5`, or the folder of both; or a
        file `*.sqlite`, which has both splits.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      image: column of images. Default: "pixels" or "image".
      label: column of labels. Default: "label".
      test_fraction: fraction of each user's examples that becomes the test split, if there is no
        file for tests.

    Returns:
      `(arrays, meta)` with users.

    Raises:
      ConfigError: if h5py is not installed, or if files or columns are missing or damaged.
    """
    splits = _find_files(Path(location))

    def read(chosen: Mapping[str, Path]) -> tuple[SplitArrays, dict[str, Any]]:
        arrays = join_users({s: _iter_users(file, s, image, label) for s, file in chosen.items()})
        is_text = next(iter(arrays.values()))["inputs"].ndim == 2
        return arrays, {"num_tokens": TFF_NUM_TOKENS, "task": "next_token"} if is_text else {}

    identity = list_files(splits.values()), image, label
    arrays, facts = load_splits(
        *("tff", splits, read, identity, cache_dir),
        test_fraction=test_fraction,
        has_test_option=False,
    )
    return arrays, {**facts, "source": "tff", "order": USER_ORDER, "channels": "last"}


def _find_files(path: Path) -> dict[str, Path]:
    """Return the file of each split."""
    files = sorted(path.glob("*_train.h5")) if path.is_dir() else [path]
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ConfigError(
            f"{path} has the files *_train.h5: {names}; expected one, or name the file"
        )
    if not files[0].is_file():
        raise ConfigError(f"no file {files[0]}")
    if files[0].suffix == _SQLITE:
        return dict.fromkeys(("train", "test"), files[0])
    test = files[0].with_name(files[0].name.replace("train", "test"))
    return {"train": files[0]} | ({"test": test} if test != files[0] and test.is_file() else {})


def _iter_users(
    path: Path, split: str, image: str | None, label: str | None
) -> Iterator[UserExamples]:
    iter_columns = _iter_sqlite_columns if path.suffix == _SQLITE else _iter_hdf5_columns
    try:
        for user, columns in iter_columns(path, split):
            if image is None and _TEXT in columns:
                yield UserExamples(user, *encode_snippets(columns[_TEXT][()].tolist()))
                continue
            images = columns[_find_column(columns, image, _IMAGES, "image")][()]
            labels = columns[_find_column(columns, label, _LABELS, "label")][()]
            if images.ndim == 2:  # flat
                if (shape := guess_shape(images.shape[1])) is None:
                    raise ConfigError(
                        f"{path} has images of {images.shape[1]} pixels: expected squares"
                    )
                images = images.reshape(len(images), *shape)
            yield UserExamples(user, images[..., None] if images.ndim == 3 else images, labels)
    except ConfigError:
        raise
    except (*READ_ERRORS, LookupError, ValueError, AttributeError, TypeError) as error:
        reason = summarize_error(error)
        raise ConfigError(
            f"{path} cannot be read ({reason}): expected a file of TensorFlow Federated"
        ) from error


def _iter_hdf5_columns(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    """Yield each user of an HDF5 file with a group of columns."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError("HDF5 files need `pip install 'fedjax_het[tff]'`") from error
    with h5py.File(path) as file:
        yield from file["examples"].items()


def _iter_sqlite_columns(path: Path, split: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield each user of a split of an SQLite file with columns `[N]` or `[N, values]` by name."""
    import sqlite3

    address = f"{path.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            rows = connection.execute(_QUERY, (split,))
            for user, group in itertools.groupby(rows, lambda row: row[0]):
                examples = [_parse_example(content) for _, content in group]
                yield str(user), {n: _stack([each[n] for each in examples]) for n in examples[0]}
    except sqlite3.Error as error:
        raise ValueError(error) from error


def _parse_example(content: bytes) -> dict[str, Any]:
    """Return the values of each column of a serialized example."""
    from tensorflow_datasets.proto import tf_example_pb2

    try:
        features = tf_example_pb2.Example.FromString(content).features.feature
    except Exception as error:  # protobuf has its own errors
        raise ValueError(error) from error
    return {
        name: getattr(values, values.WhichOneof("kind")).value for name, values in features.items()
    }


def _stack(values: list[Any]) -> np.ndarray:
    """Return the values of a column, `[N]` for one value of each example."""
    if isinstance(values[0][0], bytes):
        return np.array([value[0] for value in values], object)
    array = np.array([list(value) for value in values])
    return array[:, 0] if array.shape[1] == 1 else array


def _find_column(columns: Any, name: str | None, names: tuple[str, ...], kind: str) -> str:
    candidates = names if name is None else (name,)
    if (column := next((c for c in candidates if c in columns), None)) is None:
        raise ConfigError(
            f"no column {' or '.join(candidates)} (columns: {', '.join(columns)}): expected "
            f"{kind}=COLUMN"
        )
    return column


SOURCE = Source(
    "tff",
    "tff:FILE, files of TensorFlow Federated by user: FEMNIST, Shakespeare",
    read=read_tff,
)
