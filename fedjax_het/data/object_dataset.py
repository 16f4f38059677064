"""Data sets from Python objects: PyTorch, Hugging Face datasets, pandas frames, lists."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedjax_het.data.dataset import Dataset, dataset_from_arrays
from fedjax_het.data.image_decoding import Side, to_height_and_width
from fedjax_het.data.sources.hf import open_hf_splits, read_tables
from fedjax_het.data.sources.splits import TestFraction, choose_splits, join_splits
from fedjax_het.data.sources.tables import (
    Columns,
    InputOptions,
    Table,
    convert_tables,
    get_form,
)
from fedjax_het.data.sources.texts import TextUnit
from fedjax_het.data.validation import NumTokens
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import ConfigError, require

ROW_ORDER = "rows"
"""Order of examples as in a Python object."""
_EXPECTED = (
    "a data set with __len__ and __getitem__, a pandas frame, a datasets.Dataset, or a dictionary "
    "of these by split"
)
_Column = str | int


@validate_arguments
def dataset_from_object(
    train: Any,
    test: Any = None,
    *,
    image: _Column | None = None,
    inputs: _Column | Sequence[_Column] | None = None,
    text: _Column | None = None,
    label: _Column | None = None,
    client: _Column | None = None,
    domain: _Column | None = None,
    test_fraction: TestFraction | None = None,
    size: tuple[Side, Side] | Side | None = None,
    channels: Literal["first", "last"] | None = None,
    unit: TextUnit = "words",
    length: PositiveInt | None = None,
    num_tokens: NumTokens | Mapping[str, int | None] | None = None,
    task: str | None = None,
    name: str = "user",
    class_names: Sequence[str] = (),
) -> Dataset:
    """Build a `Dataset` from a Python object that holds labeled examples.

    Rows are tuples `(input, label, ...)` or dictionaries, as PyTorch data sets return them, or rows
    of a table. An input is an image, an array, a dictionary of arrays by name, or a text; or it
    consists of the numbers and texts of several columns. Images are arrays, tensors, images of
    Pillow, encoded files as bytes, or paths with the suffix of an image file. Tensors of PyTorch
    have the layout `[C, H, W]`, other images `[H, W, C]`. Arrays with two axes are gray images
    `[H, W]` of uint8 or uint16, or else series `[T, F]`; `image` makes them images.

    Args:
      train: training examples: an object with `__len__` and `__getitem__`, a pandas frame or a
        `datasets.Dataset`. Or a dictionary of these by split, such as a `datasets.DatasetDict`,
        with the splits train and test, or train and validation.
      test: test examples, an object of this kind.
      image: column or position of images in a row. Default: "image", "img", ..., or 0 for files of
        images.
      inputs: column or position of arrays: features `[F]`, series `[T, F]`, tokens `[T]`, or a
        dictionary of them. Or columns of numbers and texts, which are features and categories.
        Default: "inputs", "features", "input_ids", "tokens", or 0 for arrays; without a column of
        images, arrays or texts, all other columns.
      text: column or position of texts, which become tokens. Default: "text", "sentence",
        "content", "x", or 0 for texts.
      label: column or position of the label. Default: "label", "fine_label", ..., or 1.
      client: column or position of the client, for the partition `natural`. Default: "client_id",
        "writer_id", ..., if there is such a column.
      domain: column or position of the domain. Default: "domain", ..., if there is such a column.
      test_fraction: fraction of the examples of each client, or of each class, that becomes the
        test split. Only without `test`.
      size: size to which images that are no arrays are resized, (height, width) or one number.
      channels: axis of the channels of arrays, "first" or "last". Default: "first" for tensors of
        PyTorch, otherwise "last".
      unit: tokens of a text, words or characters.
      length: number of tokens of a text. Default: 200. Longer texts are cut.
      num_tokens: number of different tokens of arrays, see `dataset_from_arrays`; of texts the
        maximum, by default 32,000.
      task: kind of the task, see `dataset_from_arrays`. Default: "regression" for labels that are
        not all whole numbers or texts. With "next_token", the labels of a text are its following
        tokens.
      name: name of the data set, shown in results.
      class_names: name of each class. Default: the names that the object has, or labels that are
        texts in ascending order.

    Returns:
      The data set.

    Raises:
      ConfigError: if the object has another form, if a column is missing, or if an array is
        invalid.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_object
      >>> rows = [(np.full((4, 4), 40 * i, np.uint8), "ab"[i % 2]) for i in range(6)]
      >>> dataset_from_object(rows[:4], rows[4:], name="shades")
      Dataset('shades': 4 train and 2 test images (4, 4, 1), 2 classes)
      >>> people = [{"age": 20.0 + i, "sex": "fm"[i % 2], "label": i // 3} for i in range(6)]
      >>> dataset_from_object(people, test_fraction=0.5).input_shape
      {'category': (1,), 'numbers': (1,)}
    """
    splits, is_divided = {"train": train, "test": test}, test_fraction is not None
    if test is None and isinstance(train, Mapping):
        split_names = [*map(str, train)]
        expected = "splits such as train and test; a frame of pandas for columns"
        require("train" in split_names or len(train) == 1, "train", split_names, expected)
        train_name, test_name = choose_splits(
            split_names, divides=is_divided, has_test_option=False
        )
        splits = {"train": train[train_name], "test": train.get(test_name)}
    require(not is_divided or test is None, "test_fraction", test_fraction, "no test, or None")
    if is_divided:
        del splits["test"]
    for argument, split in splits.items():
        is_valid = hasattr(split, "__getitem__") and not isinstance(split, str | bytes | Mapping)
        num_rows = _count_rows(split)
        is_valid = is_valid and num_rows is not None
        expected = _EXPECTED + ("" if argument == "train" else ", or test_fraction=0.2")
        require(is_valid, argument, split, expected)
        require(num_rows != 0, f"len({argument})", num_rows, "at least one example")
    columns = Columns(image, inputs, text, label, client, domain)
    sides = to_height_and_width(size)
    options = InputOptions(sides, channels, unit, length, num_tokens, task)
    if all(hasattr(s, "with_format") and hasattr(s, "features") for s in splits.values()):
        tables = {key: read() for key, read in open_hf_splits(splits).items()}
        arrays, facts = read_tables(tables, columns, options)
    else:
        rows = {split: _collect_columns(split, rows) for split, rows in splits.items()}
        has_positions = all(isinstance(name, int) for name in rows["train"])
        if has_positions and not _is_frame(splits["train"]):
            columns = _use_default_positions(columns, rows["train"], task)
        own_names = _find_class_names(splits["train"])
        arrays, facts = convert_tables(rows, columns, options, class_names=own_names)
    test_split = None if is_divided else "test"
    joined: dict[str, Any] = join_splits(arrays, "train", test_split, test_fraction)
    kind = type(next(iter(splits.values())))
    own_names = facts.pop("class_names", ())
    class_names = tuple(class_names) or own_names
    return dataset_from_arrays(
        **joined,
        **facts,
        name=name,
        class_names=class_names,
        source=f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
        order=ROW_ORDER,
    )


def _count_rows(rows: Any) -> int | None:
    """Return the number of rows; None for an object without a length."""
    try:
        return len(rows)
    except TypeError:
        return None


def _is_frame(rows: Any) -> bool:
    return hasattr(rows, "columns") and hasattr(rows, "iloc")


def _use_default_positions(columns: Columns, rows: Table, task: str | None) -> Columns:
    """Return the columns of rows that are tuples: the input at 0 and the label at 1."""
    if columns.image is None and columns.inputs is None and columns.text is None:
        kinds = {"file": "image", "path": "image", "text": "text"}
        columns = columns._replace(**{kinds.get(get_form(rows[0]), "inputs"): 0})
    is_text_alone = task == "next_token" and columns.text is not None
    return columns._replace(label=1) if columns.label is None and not is_text_alone else columns


def _collect_columns(split: str, rows: Any) -> Table:
    """Return the values of each column of one split, by name or position."""
    if _is_frame(rows):
        return dict(rows.items())
    items = [rows[position] for position in range(len(rows))]
    first = items[0]
    if isinstance(first, Mapping):
        names: list[Any] = [*first]
    elif isinstance(first, tuple | list) and len(first) >= 1:
        names = [*range(len(first))]
    else:
        raise ConfigError(f"{split}[0] is a {type(first).__name__}: expected (input, label, ...)")
    try:
        return {name: [item[name] for item in items] for name in names}
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{split}: an item lacks a column ({error!r}) of {names}") from error


def _find_class_names(rows: Any) -> tuple[str, ...]:
    """Return the names of classes that data sets of torchvision have, also inside a subset."""
    for owner in (rows, getattr(rows, "dataset", None)):
        names = getattr(owner, "classes", None)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()
