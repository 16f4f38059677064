"""Hugging Face data sets: downloaded by `datasets`, saved to disk, or as parquet files."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_het.data.image_decoding import Side, to_height_and_width
from fedjax_het.data.sources.arrow import ArrowColumns, read_column_types
from fedjax_het.data.sources.source import FILE_ORDER, Content, Source, list_files
from fedjax_het.data.sources.splits import SplitArrays, TestFraction, load_splits
from fedjax_het.data.sources.tables import Columns, InputOptions, convert_tables
from fedjax_het.data.sources.texts import TextUnit
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, summarize_error

_SPLIT = re.compile(r"(train|test|validation|valid|val)(?=[-_.]|$)")


def read_hf(
    location: str,
    cache_dir: Any = None,
    *,
    image: str | None = None,
    inputs: tuple[str, ...] | None = None,
    text: str | None = None,
    label: str | None = None,
    client: str | None = None,
    domain: str | None = None,
    unit: TextUnit = "words",
    length: PositiveInt | None = None,
    num_tokens: PositiveInt | None = None,
    task: str | None = None,
    train: str = "train",
    test: str | None = None,
    test_fraction: TestFraction | None = None,
    size: tuple[Side, Side] | Side | None = None,
    config: str | None = None,
    revision: str | None = None,
) -> Content:
    """Read a Hugging Face data set of images, texts, arrays or tables.

    A folder is read by pyarrow: a folder that `save_to_disk` wrote, or a folder of parquet files.
    Another location is the name of a data set on the Hub, which the library `datasets` downloads.

    Args:
      location: a folder, a parquet file, or a name such as "uoft-cs/cifar10".
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      image: column of images. Default: "image", "img", ..., or the only column of type Image.
      inputs: a column of lists, which are features `[F]`, series `[T, F]` or tokens `[T]`; or
        columns of numbers and texts, which are features and categories. Default: "inputs",
        "features", "input_ids" or "tokens"; without a column of images, lists or texts, all other
        columns.
      text: column of texts, which become tokens. Default: "text", "sentence", "content" or "x".
      label: column of labels. Default: "label", "fine_label", ..., or the only ClassLabel.
      client: column of clients, for the partition `natural`. Default: "client_id", "writer_id", ...
      domain: column of domains. Default: "domain", ...
      unit: tokens of a text, words or characters.
      length: number of tokens of a text. Default: 200. Longer texts are cut.
      num_tokens: number of different tokens of lists; of texts the maximum, by default 32,000.
      task: kind of the task. Default: "regression" for labels that are not all whole numbers or
        texts. With "next_token", the labels of a text are its following tokens.
      train: name of the training split.
      test: name of the test split. Default: "test", or else a validation split.
      test_fraction: fraction of the training split that is drawn as the test split.
      size: size to which images are resized, (height, width) or one number for both, in pixels.
      config: name of the configuration on the Hub.
      revision: version on the Hub: a branch, a tag or a commit.

    Returns:
      `(arrays, meta)`.

    Raises:
      ConfigError: if the data cannot be found or read, or if `datasets` is needed and missing.
    """
    path = Path(location)
    if path.exists():
        tables, fingerprint = (
            _open_folder(path) if path.is_dir() else _open_files({"train": [path]})
        )
    else:
        tables, fingerprint = _download(location, config, revision)
    columns = Columns(image, inputs, text, label, client, domain)
    options = InputOptions(to_height_and_width(size), None, unit, length, num_tokens, task)

    def read(chosen: Tables) -> tuple[SplitArrays, dict[str, Any]]:
        return read_tables(
            {name: open_table() for name, open_table in chosen.items()}, columns, options
        )

    identity = (fingerprint, columns, options)
    names: Any = {"train": train, "test": test, "test_fraction": test_fraction}
    arrays, meta = load_splits("hf", tables, read, identity, cache_dir, **names)
    return arrays, {**meta, "source": "hf", "order": FILE_ORDER}


def read_tables(
    tables: Mapping[str, Any], columns: Columns = Columns(), options: InputOptions = InputOptions()
) -> tuple[SplitArrays, dict[str, Any]]:
    """Convert Arrow tables to arrays, see `convert_tables`.

    Args:
      tables: `pyarrow.Table` of each split.
      columns: the columns that the user names.
      options: options of the conversion.

    Returns:
      `(arrays, facts)`.

    Raises:
      ConfigError: if a column is missing or cannot be converted.
    """
    converted = {split: ArrowColumns(table) for split, table in tables.items()}
    types = read_column_types(next(iter(tables.values())))
    return convert_tables(converted, columns, options, types=types)


Tables = Mapping[str, Any]
"""Functions that return `pyarrow.Table`, by the names of splits."""


def _open_folder(folder: Path) -> tuple[Tables, str]:
    """Return the tables of a folder, and a text that identifies them."""
    if (folder / "dataset_dict.json").is_file():
        names = _read_json(folder / "dataset_dict.json").get("splits", [])
        return _open_files({name: _list_arrow_files(folder / name) for name in map(str, names)})
    if (folder / "state.json").is_file():
        return _open_files({"train": _list_arrow_files(folder)})
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        match = _SPLIT.match(path.name)
        if match is None and path.parent != folder:
            match = _SPLIT.match(path.parent.name)
        splits.setdefault(match[1] if match else "train", []).append(path)
    for name, paths in splits.items():
        parents = sorted({path.parent for path in paths})
        if len(parents) > 1:
            raise ConfigError(
                f"{folder} has the split {name} in {parents[0].relative_to(folder)} and "
                f"{parents[1].relative_to(folder)}: expected the folder of one configuration"
            )
    if not splits:
        raise ConfigError(
            f"{folder} has no known format: expected a folder that `save_to_disk` wrote, or parquet "
            "files"
        )
    return _open_files(splits)


def _list_arrow_files(folder: Path) -> list[Path]:
    files = _read_json(folder / "state.json").get("_data_files", [])
    return [folder / Path(str(file.get("filename"))).name for file in files]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error


def _open_files(splits: Mapping[str, list[Path]]) -> tuple[Tables, str]:
    listing = {name: list_files(paths) for name, paths in splits.items()}
    tables = {name: lambda paths=paths: _read_files(paths) for name, paths in splits.items()}
    return tables, repr(listing)


def _read_files(paths: list[Path]) -> Any:
    """Return the rows of parquet or Arrow files as one `pyarrow.Table`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in paths:
        try:
            if path.suffix == ".arrow":
                with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                    table = reader.read_all()
            else:
                table = pq.read_table(path)
            table.validate(full=True)  # Arrow files have no checksums
            str(table.schema)  # decodes all names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = summarize_error(error)
            raise ConfigError(f"{path} cannot be read ({reason})") from error
        tables.append(table)
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise ConfigError(f"{paths[0]} and {paths[-1]} have other columns") from error


def _download(name: str, config: str | None, revision: str | None) -> tuple[Tables, str]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"no folder {name}; a data set of the Hub needs `pip install 'fedjax_het[hf]'`"
        ) from error
    try:
        splits = datasets.load_dataset(name, config, revision=revision)
    except Exception as error:  # errors of the network, of the Hub and of the files
        reason = summarize_error(error)
        raise ConfigError(
            f"no folder {name}, and no data set of the Hub ({type(error).__name__}: {reason})"
        ) from error
    return open_hf_splits(splits), repr([(n, split._fingerprint) for n, split in splits.items()])


def open_hf_splits(splits: Mapping[str, Any]) -> Tables:
    """Return the tables of `datasets.Dataset` objects.

    Args:
      splits: the objects by the names of splits.

    Returns:
      Functions that return `pyarrow.Table` with types of columns, by the names of splits.
    """

    def read(split: Any) -> Any:
        table = split.with_format("arrow")[:]
        return table.replace_schema_metadata(split.features.arrow_schema.metadata)

    return {name: lambda split=split: read(split) for name, split in splits.items()}


SOURCE = Source(
    "hf",
    "hf:NAME on the Hugging Face Hub, or hf:FOLDER of save_to_disk or of parquet files",
    read=read_hf,
)
