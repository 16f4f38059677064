"""Data sets from Python objects: PyTorch, Hugging Face datasets, pandas frames, lists."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedjax_het.data.dataset import Dataset, dataset_from_arrays
from fedjax_het.data.image_decoding import Side, decode_images, to_height_and_width
from fedjax_het.data.sources.hf import open_hf_splits
from fedjax_het.data.sources.source import to_indices
from fedjax_het.data.sources.splits import TestFraction, choose_splits, join_splits
from fedjax_het.data.sources.tables import CONVENTIONS, Columns, read_tables
from fedjax_het.data.validation import move_channels_last, to_array
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, require

ROW_ORDER = "rows"
"""Order of examples as in a Python object."""
_EXPECTED = (
    "a data set with __len__ and __getitem__, a pandas frame, a datasets.Dataset, or a dictionary "
    "of these by split"
)
_ARRAY_NAMES = {"client": "users", "domain": "domains"}


@validate_arguments
def dataset_from_object(
    train: Any,
    test: Any = None,
    *,
    image: str | int | None = None,
    label: str | int | None = None,
    client: str | int | None = None,
    domain: str | int | None = None,
    test_fraction: TestFraction | None = None,
    size: tuple[Side, Side] | Side | None = None,
    channels: Literal["first", "last"] | None = None,
    name: str = "user",
    class_names: Sequence[str] = (),
) -> Dataset:
    """Build a `Dataset` from a Python object that holds labeled images.

    Rows are tuples `(image, label, ...)` or dictionaries, as PyTorch data sets return them, or rows
    of a table. Images are arrays, tensors, images of Pillow, encoded files as bytes, or paths.
    Tensors of PyTorch have the layout `[C, H, W]`, other arrays `[H, W, C]` or `[H, W]`.

    Args:
      train: training examples: an object with `__len__` and `__getitem__`, a pandas frame or a
        `datasets.Dataset`. Or a dictionary of these by split, such as a `datasets.DatasetDict`,
        with the splits train and test, or train and validation.
      test: test examples, an object of this kind.
      image: column or position of the image in a row. Default: "image", "img", ..., or 0.
      label: column or position of the label. Default: "label", "fine_label", ..., or 1.
      client: column or position of the client, for the partition `natural`. Default: "client_id",
        "writer_id", ..., if there is such a column.
      domain: column or position of the domain. Default: "domain", ..., if there is such a column.
      test_fraction: fraction of the examples of each client, or of each class, that becomes the
        test split. Only without `test`.
      size: size to which images that are no arrays are resized, (height, width) or one number.
      channels: axis of the channels of arrays, "first" or "last". Default: "first" for tensors of
        PyTorch, otherwise "last".
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
    """
    splits, is_divided = {"train": train, "test": test}, test_fraction is not None
    if test is None and isinstance(train, Mapping):
        train_name, test_name = choose_splits([str(key) for key in train], divides=is_divided)
        splits = {"train": train[train_name], "test": train.get(test_name)}
    require(not is_divided or test is None, "test_fraction", test_fraction, "no test, or None")
    if is_divided:
        del splits["test"]
    for argument, split in splits.items():
        is_valid = hasattr(split, "__len__") and hasattr(split, "__getitem__")
        is_valid = is_valid and not isinstance(split, str | bytes | Mapping) and len(split) > 0
        expected = _EXPECTED + ("" if argument == "train" else ", or test_fraction=0.2")
        require(is_valid, argument, split, expected)
    columns = {"image": image, "label": label, "client": client, "domain": domain}
    sides = to_height_and_width(size)
    if all(hasattr(s, "with_format") and hasattr(s, "features") for s in splits.values()):
        names = Columns(**{kind: None if c is None else str(c) for kind, c in columns.items()})
        tables = {key: read() for key, read in open_hf_splits(splits).items()}
        arrays, meta = read_tables(tables, names, sides)
    else:
        arrays, meta = _read_rows(splits, columns, sides, channels)
    test_split = None if is_divided else "test"
    joined: dict[str, Any] = join_splits(arrays, "train", test_split, test_fraction)
    kind = type(next(iter(splits.values())))
    class_names = tuple(class_names) or meta["class_names"]
    return dataset_from_arrays(
        **joined,
        name=name,
        num_classes=len(class_names) or None,
        class_names=class_names,
        domain_names=meta.get("domain_names", ()),
        source=f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
        order=ROW_ORDER,
    )


def _read_rows(
    splits: Mapping[str, Any],
    columns: Mapping[str, str | int | None],
    size: tuple[int, int] | None,
    channels: str | None,
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Return arrays by split, and names of classes and domains, as `read_tables` does."""
    lists = {split: _collect(split, rows, columns) for split, rows in splits.items()}
    arrays: dict[str, dict[str, np.ndarray]] = {
        split: {"inputs": _stack_images(split, values["image"], size, channels)}
        for split, values in lists.items()
    }
    meta: dict[str, Any] = {"class_names": _find_class_names(next(iter(splits.values())))}
    for kind in ("label", "client", "domain"):
        if any(kind not in values for values in lists.values()):
            continue
        values = [_to_column(kind, split, each[kind]) for split, each in lists.items()]
        if kind != "client" and all(array.dtype.kind == "U" for array in values):
            names = "class_names" if kind == "label" else "domain_names"
            values, meta[names] = to_indices(values, meta.get(names, ()))
        for split, array in zip(lists, values, strict=True):
            arrays[split][_ARRAY_NAMES.get(kind, "labels")] = array
    # Splits may differ in the number of channels, if one of them has only gray images.
    if len({part["inputs"].shape[-1] for part in arrays.values()}) == 2:
        for part in arrays.values():
            part["inputs"] = np.broadcast_to(part["inputs"], (*part["inputs"].shape[:3], 3))
    return arrays, meta


def _collect(
    split: str, rows: Any, columns: Mapping[str, str | int | None]
) -> dict[str, list[Any]]:
    """Return the values of each column of one split."""
    if hasattr(rows, "columns") and hasattr(rows, "iloc"):  # a pandas frame
        found = _find_columns(split, list(rows.columns), columns)
        return {kind: rows[column].tolist() for kind, column in found.items()}
    items = [rows[position] for position in range(len(rows))]
    first = items[0]
    if isinstance(first, Mapping):
        found = _find_columns(split, list(first), columns)
    elif isinstance(first, tuple | list) and len(first) >= 2:
        positions = {**columns, "image": columns["image"] or 0}
        positions["label"] = 1 if columns["label"] is None else columns["label"]
        found = {kind: position for kind, position in positions.items() if position is not None}
    else:
        raise ConfigError(f"{split}[0] is a {type(first).__name__}: expected (image, label, ...)")
    try:
        return {kind: [item[column] for item in items] for kind, column in found.items()}
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{split}: an item lacks a column ({error!r}) of {found}") from error


def _find_columns(
    split: str, names: list[Any], columns: Mapping[str, str | int | None]
) -> dict[str, Any]:
    """Return the columns that the user named or that convention names."""
    found: dict[str, Any] = {}
    for kind, column in columns.items():
        if column is None:
            column = next((name for name in CONVENTIONS[kind] if name in names), None)
        if column in names and column is not None:
            found[kind] = column
        elif kind in ("image", "label") or column is not None:
            text = ", ".join(map(str, names))
            raise ConfigError(f"{split} has no column of {kind}s ({text}): expected {kind}=COLUMN")
    return found


def _stack_images(
    split: str, images: list[Any], size: tuple[int, int] | None, channels: str | None
) -> np.ndarray:
    """Return images as one array `[N, H, W, C]`."""
    from PIL import Image

    argument = f"{split}_inputs"
    if isinstance(images[0], Image.Image | bytes | str):
        return decode_images(images, lambda i: f"{split}[{i}]", size=size, color=None)
    require(size is None, "size", size, "None, as the images are arrays")
    is_tensor = type(images[0]).__module__.partition(".")[0] == "torch"
    expected = "arrays of one shape [H, W, C], images of Pillow, or encoded files"
    stacked = to_array(
        argument, [to_array(argument, image, expected) for image in images], expected
    )
    if stacked.ndim == 3:
        return stacked[..., None]
    return move_channels_last(argument, stacked, channels or ("first" if is_tensor else None))


def _to_column(kind: str, split: str, values: list[Any]) -> np.ndarray:
    """Return labels, clients or domains as integers or texts `[N]`."""
    expected = "integers or texts, one for each row"
    column = to_array(f"{kind}s of {split}", list(map(_to_scalar, values)), expected)
    require(column.ndim == 1, f"{kind}s of {split}", column.shape, expected)
    return column


def _to_scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _find_class_names(rows: Any) -> tuple[str, ...]:
    """Return the names of classes that data sets of torchvision have, also inside a subset."""
    for owner in (rows, getattr(rows, "dataset", None)):
        names = getattr(owner, "classes", None)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()
