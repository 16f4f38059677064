"""Tables in CSV and parquet files, with numbers, categories or texts and a column of labels."""

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_het.data.sources.source import FILE_ORDER, Content, Source
from fedjax_het.data.sources.splits import TestFraction, choose_splits, join_splits
from fedjax_het.data.sources.tables import CONVENTIONS, Columns, InputOptions, convert_tables
from fedjax_het.data.sources.texts import TextUnit
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, summarize_error

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("fedjax_het")
_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".parquet")
_UNNAMED = "Unnamed: "  # how pandas names a column without a name


def read_csv_dataset(
    location: str,
    cache_dir: Any = None,
    *,
    label: str | None = None,
    client: str | None = None,
    domain: str | None = None,
    inputs: tuple[str, ...] | None = None,
    text: str | None = None,
    unit: TextUnit = "words",
    length: PositiveInt | None = None,
    num_tokens: PositiveInt | None = None,
    task: str | None = None,
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
      client: column of the clients. Default: a column named client, user, subject, ... or one of
        these with `_id`.
      domain: column of the domains. Default: a column named domain, domain_id or style.
      inputs: columns of numbers and texts. Default: all other columns.
      text: column of texts that become tokens, in place of `inputs`.
      unit: tokens of a text, words or characters.
      length: number of tokens of a text. Default: 200. Longer texts are cut.
      num_tokens: maximum number of different tokens of texts. Default: 32,000.
      task: kind of the task. Default: "regression" for labels that are not all whole numbers or
        texts. With "next_token", the labels of a text are its following tokens.
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
    tables = {name: dict(frames[name].items()) for name in names if name is not None}
    arrays, facts = convert_tables(
        tables,
        Columns(inputs=inputs, text=text, label=label, client=client, domain=domain),
        InputOptions(unit=unit, length=length, num_tokens=num_tokens, task=task),
        conventions={kind: CONVENTIONS[kind] for kind in ("label", "client", "domain")},
    )
    return join_splits(arrays, *names, test_fraction, facts.get("task")), facts | {
        "source": "csv",
        "order": FILE_ORDER,
    }


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
        with_missing = [
            name
            for name, column in frame.items()
            if column.hasnans and any(isinstance(value, str) for value in column)
        ]
        if with_missing:  # texts such as NA are no missing values in a column of texts
            options = {"usecols": with_missing, "dtype": str, "keep_default_na": False}
            texts = pd.read_csv(path, sep=separator, index_col=False, na_values=[""], **options)
            frame[with_missing] = texts[with_missing]
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


SOURCE = Source(
    "csv",
    "csv:FILE or csv:FOLDER, tables of numbers and categories in CSV or parquet files",
    read=read_csv_dataset,
)
