"""Conversion of tables of any origin to inputs, labels, users and domains."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_het.data.class_labels import to_label_array
from fedjax_het.data.image_decoding import IMAGE_SUFFIXES, decode_images
from fedjax_het.data.sources.features import convert_features
from fedjax_het.data.sources.splits import SplitArrays
from fedjax_het.data.sources.texts import (
    DEFAULT_LENGTH,
    DEFAULT_NUM_TOKENS,
    PADDING,
    TextUnit,
    encode_texts,
)
from fedjax_het.data.validation import move_channels_last
from fedjax_het.tasks import TASKS
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.errors import ConfigError, format_value, require

if TYPE_CHECKING:
    import pandas as pd

_GENERAL_NAME = "x"  # of image files, paths, arrays or texts
CONVENTIONS: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "img", "images", "pixel_values", _GENERAL_NAME),
    "inputs": ("inputs", "features", "input_ids", "tokens", _GENERAL_NAME),
    "text": ("text", "sentence", "content", _GENERAL_NAME),
    "label": ("label", "labels", "fine_label", "target", "class", "character", "y"),
    "client": (
        *("client", "client_id", "user", "user_id", "writer_id", "writer", "speaker_id"),
        *("natural_id", "subject"),
    ),
    "domain": ("domain", "domain_id", "style"),
}
"""Names of columns in the order of preference, by the kind of the column."""
_log = logging.getLogger("fedjax_het")
_FEATURE_TYPES = {"image": "Image", "label": "ClassLabel"}
_ARRAY_NAMES = {"label": "labels", "client": "users", "domain": "domains"}
_INPUT_KINDS = ("image", "inputs", "text")
_SCALAR_FORMS = ("scalar", "text", "path")
_TASK_WITHOUT_LABELS = "next_token"  # the labels are the texts themselves

Table = Mapping[Any, Any]
"""Columns of a split by name or position: lists, arrays or pandas series of N values."""


class Columns(NamedTuple):
    """Names or positions of the columns of a table; None: by convention."""

    image: Any = None
    "Images: encoded files, images of Pillow, paths or arrays."
    inputs: Any = None
    "A column of arrays; or columns of numbers and texts, which are features and categories."
    text: Any = None
    "Texts, which become tokens."
    label: Any = None
    client: Any = None
    domain: Any = None


class InputOptions(NamedTuple):
    """Options of the conversion of columns to arrays."""

    size: tuple[int, int] | None = None
    "(height, width) to which images of files are resized, or None."
    channels: str | None = None
    "Axis of the channels of images of arrays; None: as PyTorch has it, or last."
    unit: TextUnit = "words"
    "Tokens of a text: words or characters."
    length: int | None = None
    "Number of tokens of a text."
    num_tokens: Any = None
    "Number of different tokens: of arrays, or at most of texts."
    task: str | None = None
    "Kind of the task; None: by the labels."


def convert_tables(
    tables: Mapping[str, Table],
    columns: Columns = Columns(),
    options: InputOptions = InputOptions(),
    *,
    types: Mapping[str, Mapping[str, Any]] | None = None,
    conventions: Mapping[str, tuple[str, ...]] = CONVENTIONS,
    class_names: Sequence[str] = (),
) -> tuple[SplitArrays, dict[str, Any]]:
    """Convert the columns of tables to arrays.

    Inputs are images, arrays or texts of one column. Without such a column, all columns that have
    no other use are features and categories.

    Args:
      tables: the columns of each split; the first split is for training.
      columns: the columns that the user names.
      options: options of the conversion.
      types: for columns of Hugging Face data sets, their types as `datasets` stores them.
      conventions: names of columns that the user need not name, by the kind of the column.
      class_names: name of each class, if the origin of the table has names.

    Returns:
      For each split, arrays `inputs`, `labels` and, if there are such columns, `users` and
      `domains`; and facts: names of classes and domains, the task and the number of tokens.

    Raises:
      ConfigError: if a column is missing or cannot be converted.
    """
    if options.task is not None:
        TASKS.require(options.task)
    found = _find_columns(next(iter(tables.values())), columns, options, types or {}, conventions)
    used = [c for value in found.values() for c in (value if isinstance(value, list) else [value])]
    for split, table in tables.items():
        missing = [column for column in used if column is not None and column not in table]
        if missing:
            text = ", ".join(map(str, table))
            raise ConfigError(f"split {split!r} has no column {missing[0]!r} (columns: {text})")

    def read(column: Any) -> dict[str, Any]:
        return {split: table[column] for split, table in tables.items()}

    inputs, meta = _convert_inputs(tables, found, options)
    arrays: SplitArrays = {
        split: {"inputs": array} for split, array in zip(tables, inputs, strict=True)
    }
    for kind, array_name in _ARRAY_NAMES.items():
        if (column := found[kind]) is None:
            continue
        names = tuple(map(str, (types or {}).get(column, {}).get("names") or ()))
        if kind == "label":
            values, facts = _convert_labels(
                read(column), column, options.task, names or class_names
            )
        else:
            values, facts = _convert_groups(kind, read(column), column, names)
        meta |= facts
        for split, array in zip(tables, values, strict=True):
            arrays[split][array_name] = array
    if found["label"] is None:  # the labels of tokens are the following tokens
        meta["task"] = _TASK_WITHOUT_LABELS
        for part in arrays.values():
            tokens = part["inputs"]
            part["labels"] = np.where(tokens[:, 1:] == PADDING, -1, tokens[:, 1:])
            part["inputs"] = np.ascontiguousarray(tokens[:, :-1])
    return arrays, meta


def _find_columns(
    table: Table,
    columns: Columns,
    options: InputOptions,
    types: Mapping[str, Mapping[str, Any]],
    conventions: Mapping[str, tuple[str, ...]],
) -> dict[str, Any]:
    """Return the columns of each kind; None: none. `inputs` may be a list of columns."""
    all_names = ", ".join(map(str, table))
    found: dict[str, Any] = {}
    for kind, column in columns._asdict().items():
        several = [*column] if isinstance(column, list | tuple) else [column]
        require(len(several) > 0, kind, column, "at least one column, or None")
        for name in several:
            if name is not None and name not in table:
                raise ConfigError(
                    f"{kind} = {format_value(name)}: no such column (columns: {all_names})"
                )
        found[kind] = several if len(several) > 1 else several[0]
        if kind not in _INPUT_KINDS and column is None:
            found[kind] = _find_by_convention(kind, table, types, conventions)
    given = [kind for kind in _INPUT_KINDS if found[kind] is not None]
    if len(given) > 1:
        raise ConfigError(f"{', '.join(given)}: expected one of them")
    for kind in _INPUT_KINDS:
        several = found[kind] if isinstance(found[kind], list) else [found[kind]]
        is_valid = found["label"] is None or found["label"] not in several
        expected = f"other columns than the column of labels, {found['label']!r}"
        require(is_valid, kind, found[kind], expected)
    for kind in _INPUT_KINDS:
        if all(found[other] is None for other in _INPUT_KINDS):
            found[kind] = _find_by_convention(kind, table, types, conventions)
            unused = [str(name) for name in table if name not in found.values()]
            if kind == "text" and found[kind] is not None and unused:
                names = ", ".join(unused)
                _log.warning("note: column %r is the input; not used: %s", found[kind], names)
    needs_label = not (options.task == _TASK_WITHOUT_LABELS and found["text"] is not None)
    if needs_label and found["label"] is None:
        raise ConfigError(f"no column of labels (columns: {all_names}): expected label=COLUMN")
    if not needs_label and columns.label is None:
        found["label"] = None
    if all(found[kind] is None for kind in _INPUT_KINDS):
        others = {found[kind] for kind in _ARRAY_NAMES}
        found["inputs"] = [name for name in table if name not in others]
        if not found["inputs"]:
            raise ConfigError(
                f"the table has no column besides labels and clients (columns: {all_names})"
            )
    return found


def _find_by_convention(
    kind: str,
    table: Table,
    types: Mapping[str, Mapping[str, Any]],
    conventions: Mapping[str, tuple[str, ...]],
) -> Any:
    """Return the column with a conventional name or the only one of its type; or None."""
    for name in conventions.get(kind, ()):
        if name in table and _is_suitable(kind, name, table[name]):
            return name
    typed = [n for n in table if types.get(n, {}).get("_type") == _FEATURE_TYPES.get(kind, "")]
    return typed[0] if kind in conventions and len(typed) == 1 else None


def _is_suitable(kind: str, name: str, values: Any) -> bool:
    """Return whether a column has values of a kind of input; True for labels and groups."""
    if kind not in _INPUT_KINDS:
        return True
    form = get_form(values)
    if kind == "image":
        return form in ("file", "path") or (form != "scalar" and name != _GENERAL_NAME)
    return form in (("text", "path") if kind == "text" else ("array", "mapping"))


def get_form(values: Any) -> str:
    """Return the form of a column's values: file, path, text, array, mapping or scalar.

    A path is a text with the suffix of an image file.
    """
    from PIL import Image

    if isinstance(values, np.ndarray) and values.ndim > 1:
        return "array"
    value = next((v for v in values if v is not None and v is not np.nan), None)
    if isinstance(value, str):
        return "path" if Path(value).suffix.lower() in IMAGE_SUFFIXES else "text"
    if isinstance(value, bytes | Image.Image):
        return "file"
    if isinstance(value, Mapping):
        return "mapping"
    is_array = isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
    return "array" if is_array else "scalar"


def _convert_inputs(
    tables: Mapping[str, Table], found: Mapping[str, Any], options: InputOptions
) -> tuple[list[Any], dict[str, Any]]:
    """Return the inputs of each split, and their facts."""
    kind = next(kind for kind in _INPUT_KINDS if found[kind] is not None)
    column = found[kind]
    if kind != "text":
        require(options.length is None, "length", options.length, "no value, as there is no text")
    if isinstance(column, list) or (
        kind == "inputs" and get_form(next(iter(tables.values()))[column]) in _SCALAR_FORMS
    ):
        expected = "no value, as inputs are numbers and categories"
        require(options.num_tokens is None, "num_tokens", options.num_tokens, expected)
        return _convert_features(tables, column if isinstance(column, list) else [column])
    values = {split: table[column] for split, table in tables.items()}
    if kind == "text":
        return _convert_texts(values, column, options)
    facts = {} if options.num_tokens is None else {"num_tokens": options.num_tokens}
    form = get_form(next(iter(values.values())))
    if kind == "image" and form in ("file", "path", "text"):
        return _decode_files(values, column, options.size), facts
    require(options.size is None, "size", options.size, "None, as the inputs are arrays")
    is_image = kind == "image"
    return [
        _stack(split, v, column, options.channels, is_image) for split, v in values.items()
    ], facts


def _convert_features(
    tables: Mapping[str, Table], names: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    import pandas as pd

    frames = [
        pd.DataFrame({name: _to_series(table[name]) for name in names}) for table in tables.values()
    ]
    return convert_features(frames, names)


def _convert_texts(
    values: Mapping[str, Any], column: Any, options: InputOptions
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return the tokens of texts; a token more than the length, if the labels are tokens."""
    for split, texts in values.items():
        position = next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)
        if position is not None:
            raise ConfigError(
                f"column {column!r} has no text in row {position} of split {split!r}: expected "
                "texts"
            )
    length = options.length or DEFAULT_LENGTH
    tokens, vocabulary = encode_texts(
        [*values.values()],
        options.unit,
        length + (options.task == _TASK_WITHOUT_LABELS),
        options.num_tokens or DEFAULT_NUM_TOKENS,
    )
    return tokens, {"num_tokens": len(vocabulary), "token_names": vocabulary}


def _decode_files(
    values: Mapping[str, Any], column: Any, size: tuple[int, int] | None
) -> list[np.ndarray]:
    """Return the images of each split, of one number of channels."""
    from PIL import Image

    positions = [(split, i) for split, files in values.items() for i in range(len(files))]
    files = [file for split in values.values() for file in split]
    for (split, position), file in zip(positions, files, strict=True):
        if not isinstance(file, bytes | str | Image.Image) or not file:
            raise ConfigError(
                f"column {column!r} has no image in row {position} of split {split!r}: expected "
                "encoded files, paths, images of Pillow, or arrays"
            )

    def describe(index: int) -> str:
        split, position = positions[index]
        return f"{position} of column {column!r} of split {split!r}"

    images = decode_images(files, describe, size=size, color=None)
    return np.split(images, np.cumsum([len(files) for files in values.values()])[:-1])


def _stack(split: str, values: Any, column: Any, channels: str | None, is_image: bool) -> Any:
    """Return arrays as one array `[N, ...]`, or dictionaries of arrays as arrays by name."""
    if get_form(values) == "mapping":
        names = [*next(iter(values))]
        for position, value in enumerate(values):
            if not isinstance(value, Mapping) or {*value} != {*names}:
                raise ConfigError(
                    f"column {column!r} has other names in row {position} of split {split!r}: "
                    f"expected arrays by name, {', '.join(map(str, names))}"
                )
        return {
            name: _stack(split, [value[name] for value in values], column, channels, False)
            for name in names
        }
    argument = f"column {column!r} of split {split!r}"
    expected = "arrays of one shape in each row"
    is_tensor = False
    if not (isinstance(values, np.ndarray) and values.dtype != object):
        values = [*values]
        is_tensor = type(values[0]).__module__.partition(".")[0] == "torch"
        values = [to_array(argument, value, expected) for value in values]
    stacked = to_array(argument, values, expected)
    if stacked.ndim == 3 and is_image:
        return stacked[..., None]
    return move_channels_last(argument, stacked, channels or ("first" if is_tensor else None))


def _to_series(values: Any) -> "pd.Series":
    """Return numbers and texts as a column of pandas."""
    import pandas as pd

    if isinstance(values, pd.Series):
        return values.reset_index(drop=True)
    return pd.Series([_to_scalar(value) for value in values])


def _to_scalar(value: Any) -> Any:
    """Return the number of an array or tensor without axes, and other values as they are."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _read_column(noun: str, values: Mapping[str, Any], column: Any) -> list[np.ndarray]:
    """Return a column of numbers or texts of each split, without missing values."""
    arrays = []
    for split_values in values.values():
        series = _to_series(split_values)
        if series.isna().any():
            raise ConfigError(f"column {column!r} of {noun} has missing values")
        arrays.append(series.to_numpy())
    return arrays


def _convert_labels(
    values: Mapping[str, Any], column: Any, task: str | None, class_names: Sequence[str]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return the labels of each split, and facts of the task."""
    facts = {} if task is None else {"task": task}
    if get_form(next(iter(values.values()))) == "array":
        return [_stack(split, v, column, None, False) for split, v in values.items()], facts
    arrays = _read_column("labels", values, column)
    is_number = all(array.dtype.kind in "iuf" for array in arrays)
    is_whole = is_number and all(np.equal(np.mod(array, 1), 0).all() for array in arrays)
    if task is None and is_number and not is_whole:
        return [array.astype(np.float32) for array in arrays], {"task": "regression"}
    if task is not None and not TASKS[task].make.has_classes:
        if not is_number:
            raise ConfigError(f"column {column!r} has texts: expected numbers for task={task}")
        return arrays, facts
    arrays = [
        to_label_array(f"column {column!r} of split {split!r}", array)
        for split, array in zip(values, arrays, strict=True)
    ]
    return arrays, facts | {"class_names": class_names}


def _convert_groups(
    kind: str, values: Mapping[str, Any], column: Any, names: Sequence[str]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return the users or domains of each split, and the names of domains."""
    arrays = _read_column(f"{kind}s", values, column)
    if not all(array.dtype.kind in "iu" for array in arrays):
        arrays = [array.astype(str) for array in arrays]
    return arrays, {"domain_names": names} if kind == "domain" else {}
