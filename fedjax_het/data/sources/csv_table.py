"""Tables in CSV and parquet files, with numbers, categories and a column of labels."""

import decimal
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_het.data.sources.source import FILE_ORDER, Content, Source, to_indices
from fedjax_het.data.sources.splits import TestFraction, choose_splits, join_splits
from fedjax_het.data.sources.tables import CONVENTIONS
from fedjax_het.utils.errors import ConfigError, summarize_error

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("fedjax_het")
_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".parquet")
NUMBERS, CATEGORY = "numbers", "category"
"""Names of the arrays of a table with numbers and categories."""
_UNNAMED = "Unnamed: "  # how pandas names a column without a name
_NUMBER_TYPES = (bool, int, float, decimal.Decimal)
_MAX_NUMBER_SHARE = 0.5  # of the texts of a column of categories, without a warning


def read_csv_dataset(
    location: str,
    cache_dir: Any = None,
    *,
    label: str | None = None,
    client: str | None = None,
    task: Literal["classification", "regression"] | None = None,
    train: str = "train",
    test: str | None = None,
    test_fraction: TestFraction | None = None,
) -> Content:
    """Read a table, or a folder with a table for each split.

    Columns of numbers are features, and columns of texts are categories. A table with both has
    inputs of two arrays, `numbers` and `category`. The categories of all columns are numbered
    together, so that each category of each column has an embedding of its own.

    Args:
      location: path of a file, .csv, .csv.gz, .tsv or .parquet; or of a folder with files such as
        train.csv and test.csv.
      cache_dir: not used.
      label: column of the labels. Default: a column named label, labels, target, class or y.
      client: column of the clients. Default: a column named client, user or subject.
      task: kind of the task. Default: "regression" for labels that are not all whole numbers or
        texts.
      train: name of the training split.
      test: name of the test split. Default: test or validation.
      test_fraction: fraction of the training split that is drawn as the test split.

    Returns:
      `(arrays, meta)`.

    Raises:
      ConfigError: if a file or a column is missing, if a file cannot be read, or if a number is
        missing.
    """
    frames = {name: _read_frame(path) for name, path in _list_files(Path(location)).items()}
    names = choose_splits(frames, train, test, divides=test_fraction is not None)
    chosen = {name: frames[name] for name in names if name is not None}
    first = next(iter(chosen.values()))
    label = _find_column("label", label, first)
    if label is None:
        columns = ", ".join(map(str, first.columns))
        raise ConfigError(f"no column of labels (columns: {columns}): expected label=COLUMN")
    client = _find_column("client", client, first)
    for name, frame in chosen.items():
        if [*frame.columns] != [*first.columns]:
            columns = ", ".join(map(str, frame.columns))
            raise ConfigError(f"split {name!r} has other columns than the first split: {columns}")
    splits: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    labels, facts = _convert_labels([frame[label] for frame in chosen.values()], label, task)
    features = [column for column in first.columns if column not in (label, client)]
    inputs, num_tokens = convert_features([*chosen.values()], features)
    for split, own_labels, own_inputs, frame in zip(
        splits.values(), labels, inputs, chosen.values(), strict=True
    ):
        split |= {"inputs": own_inputs, "labels": own_labels}
        if client is not None:
            if frame[client].isna().any():
                raise ConfigError(f"column {client!r} of clients has missing values")
            split["users"] = frame[client].to_numpy().astype(str)
    arrays = join_splits(splits, *names, test_fraction)
    facts |= {"source": "csv", "order": FILE_ORDER}
    return arrays, facts | ({} if num_tokens is None else {"num_tokens": num_tokens})


def _list_files(path: Path) -> dict[str, Path]:
    """Return the files of the splits by name."""
    if path.is_file():
        return {"train": path}
    files = {
        file.name.partition(".")[0]: file
        for file in (sorted(path.iterdir()) if path.is_dir() else ())
        if file.name.endswith(_SUFFIXES)
    }
    if not files:
        raise ConfigError(f"no table in {path}: expected a file, {', '.join(_SUFFIXES)}")
    return files


def _read_frame(path: Path) -> "pd.DataFrame":
    import pandas as pd

    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        separator = "\t" if path.suffix == ".tsv" else ","
        with warnings.catch_warnings():  # of rows that have more values than the header
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(path, sep=separator, index_col=False)
    except pd.errors.ParserWarning as error:
        raise ConfigError(
            f"{path} has rows with more values than the header: expected a name for each column"
        ) from error
    except Exception as error:  # of arbitrary bytes
        reason = summarize_error(error)
        raise ConfigError(f"{path} cannot be read ({reason})") from error
    if not len(frame):
        raise ConfigError(f"{path} has no rows")
    unnamed = [name for name in frame.columns if str(name).startswith(_UNNAMED)]
    if unnamed:  # such as the index that pandas writes
        _log.warning("note: %s: %d columns without a name are left out", path, len(unnamed))
    return frame.drop(columns=unnamed)


def _find_column(kind: str, name: str | None, frame: "pd.DataFrame") -> str | None:
    if name is not None and name not in frame.columns:
        columns = ", ".join(map(str, frame.columns))
        raise ConfigError(f"{kind} = {name!r}: no such column (columns: {columns})")
    return name or next((name for name in CONVENTIONS[kind] if name in frame.columns), None)


def _convert_labels(
    columns: list["pd.Series"], name: str, task: str | None
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return the labels of each split, and facts of the task."""
    if any(column.isna().any() for column in columns):
        raise ConfigError(f"column {name!r} of labels has missing values")
    values = [column.to_numpy() for column in columns]
    is_number = all(array.dtype.kind in "iuf" for array in values)
    is_whole = is_number and all(np.equal(np.mod(array, 1), 0).all() for array in values)
    task = task or ("regression" if is_number and not is_whole else "classification")
    if task == "regression":
        if not is_number:
            raise ConfigError(f"column {name!r} has texts: expected numbers for task=regression")
        return [array.astype(np.float32) for array in values], {"task": task}
    if is_whole and all(array.min() >= 0 for array in values):
        return [array.astype(np.int32) for array in values], {}
    indices, class_names = to_indices([array.astype(str) for array in values])
    return indices, {"class_names": class_names}


def convert_features(
    frames: list["pd.DataFrame"], names: list[str]
) -> tuple[list[Any], dict[str, int] | None]:
    """Convert columns of tables to the inputs of each split.

    Args:
      frames: the table of each split.
      names: columns of numbers and of texts.

    Returns:
      `(inputs, num_tokens)`: for each split an array of numbers, or arrays of numbers and
      categories by name; and the number of categories by name, None without categories.

    Raises:
      ConfigError: if there is no column, or if a number is missing.
    """
    frames = [_convert_columns(frame, names) for frame in frames]
    numeric = [n for n in names if all(f[n].dtype.kind in "iufb" for f in frames)]
    categorical = [name for name in names if name not in numeric]
    if not names:
        raise ConfigError("the table has no column besides labels and clients")
    for name in numeric:
        if any(frame[name].isna().any() for frame in frames):
            raise ConfigError(f"column {name!r} has missing numbers: expected a number in each row")
    numbers = [frame[numeric].to_numpy().astype(np.float32) for frame in frames]
    if not categorical:
        return numbers, None
    columns, offset = [], 0
    for name in categorical:
        _warn_about_numbers(name, frames)
        texts = [frame[name].astype(object).fillna("").astype(str).to_numpy() for frame in frames]
        indices, categories = to_indices([array.astype(str) for array in texts])
        columns.append([index + offset for index in indices])
        offset += len(categories)
    categories_by_split = [np.stack(parts, axis=1) for parts in zip(*columns, strict=True)]
    inputs = [
        {CATEGORY: categories} | ({NUMBERS: own_numbers} if numeric else {})
        for categories, own_numbers in zip(categories_by_split, numbers, strict=True)
    ]
    return inputs, {CATEGORY: max(offset, 2)}


def _convert_columns(frame: "pd.DataFrame", names: list[str]) -> "pd.DataFrame":
    """Return a table whose columns of numbers, also of large or decimal ones, are floats.

    Raises:
      ConfigError: if a column has neither numbers nor texts.
    """
    converted = {}
    for name in names:
        column = frame[name]
        present = column.dropna()
        if column.dtype.kind in "mM":
            raise ConfigError(f"column {name!r} has {column.dtype}: expected numbers or texts")
        if column.dtype != object or all(isinstance(value, str) for value in present):
            converted[name] = column
        elif all(isinstance(value, _NUMBER_TYPES) for value in present):
            converted[name] = column.astype(float)
        else:
            kinds = {type(value) for value in present} - {str, *_NUMBER_TYPES}
            if kinds:
                kind = sorted(kind.__name__ for kind in kinds)[0]
                raise ConfigError(f"column {name!r} has a {kind}: expected numbers or texts")
            converted[name] = column
    return frame.assign(**converted)


def _warn_about_numbers(name: str, frames: list["pd.DataFrame"]) -> None:
    """Log a warning if most texts of a column of categories are numbers."""
    import pandas as pd

    texts = pd.concat([frame[name].dropna().astype(str) for frame in frames]).unique()
    is_number = pd.to_numeric(pd.Series(texts), errors="coerce").notna()
    if is_number.mean() > _MAX_NUMBER_SHARE and not is_number.all():
        other = texts[(~is_number).to_numpy()][0]
        _log.warning(
            "note: column %r has categories, as it has texts such as %r beside numbers", name, other
        )


SOURCE = Source(
    "csv",
    "csv:FILE or csv:FOLDER, tables of numbers and categories in CSV or parquet files",
    read=read_csv_dataset,
)
