"""Columns of Arrow tables, as Hugging Face datasets and parquet files have them, as arrays."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.data.image_decoding import decode_images
from fedjax_het.data.sources.source import to_indices
from fedjax_het.utils.errors import ConfigError

CONVENTIONS = {
    "image": ("image", "img", "images", "pixel_values", "x"),
    "label": ("label", "labels", "fine_label", "target", "class", "character", "y"),
    "client": (
        *("client", "client_id", "user", "user_id", "writer_id", "writer", "speaker_id"),
        *("natural_id", "subject"),
    ),
    "domain": ("domain", "domain_id", "style"),
}
"""Names of columns in the order of preference, by the kind of the column."""
_FEATURE_TYPES = {"image": "Image", "label": "ClassLabel"}


class Columns(NamedTuple):
    """Names of the columns of images, labels, clients and domains; None: by convention."""

    image: str | None = None
    label: str | None = None
    client: str | None = None
    domain: str | None = None


def read_tables(
    tables: Mapping[str, Any], columns: Columns = Columns(), size: tuple[int, int] | None = None
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Convert the columns of tables to arrays.

    Images are encoded files (bytes, or a structure of bytes and path, as in Hugging Face datasets)
    or nested lists of numbers. Labels are integers or texts. The metadata of Hugging Face datasets
    contain names of classes and types of columns.

    Args:
      tables: `pyarrow.Table` by the name of its split, with equal columns.
      columns: names of columns.
      size: (height, width) to which images are resized, or None.

    Returns:
      For each split, arrays `inputs`, `labels` and, if there are such columns, `users` and
      `domains`; and the names of classes and domains.

    Raises:
      ConfigError: if a column is missing or cannot be converted.
    """
    first = next(iter(tables.values()))
    features = _read_features(first)
    found = {
        kind: _find_column(kind, name, first, features) for kind, name in columns._asdict().items()
    }
    for kind in ("image", "label"):
        if found[kind] is None:
            raise ConfigError(
                f"no column of {kind}s (columns: {', '.join(first.column_names)}): expected "
                f"{kind}=COLUMN"
            )
    arrays: dict[str, dict[str, np.ndarray]] = {split: {} for split in tables}
    meta: dict[str, Any] = {}
    image = str(found["image"])
    images = _decode_column([table[image] for table in tables.values()], image, size)
    for split, split_images in zip(tables, images, strict=True):
        arrays[split]["inputs"] = split_images
    for kind, name, names in (
        ("label", "labels", "class_names"),
        ("domain", "domains", "domain_names"),
        ("client", "users", ""),
    ):
        if (column := found[kind]) is None:
            continue
        values = [_to_numpy(table[column], column) for table in tables.values()]
        if names:
            meta[names] = tuple(map(str, features.get(column, {}).get("names") or ()))
            if all(array.dtype.kind == "U" for array in values):
                values, meta[names] = to_indices(values, meta[names])
        for split, array in zip(tables, values, strict=True):
            arrays[split][name] = array
    return arrays, meta


def _read_features(table: Any) -> dict[str, Any]:
    """Return the types of columns that Hugging Face datasets store in a table, by column."""
    try:
        stored = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in stored.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _find_column(
    kind: str, name: str | None, table: Any, features: Mapping[str, Any]
) -> str | None:
    """Return the name of a column: the user's, by convention, or the only one of its type."""
    names = table.column_names
    if name is not None:
        if name not in names:
            raise ConfigError(f"{kind} = {name!r}: no such column (columns: {', '.join(names)})")
        return name
    if (match := next((n for n in CONVENTIONS[kind] if n in names), None)) is not None:
        return match
    feature_type = _FEATURE_TYPES.get(kind)
    typed = [n for n in names if feature_type and features.get(n, {}).get("_type") == feature_type]
    return typed[0] if len(typed) == 1 else None


def _to_numpy(column: Any, name: str) -> np.ndarray:
    """Return a column of integers or texts."""
    if column.null_count:
        raise ConfigError(f"column {name!r} has {column.null_count:,} missing values")
    values = column.to_numpy()
    return values.astype(str) if values.dtype == object else values


def _decode_column(
    columns: Sequence[Any], name: str, size: tuple[int, int] | None
) -> list[np.ndarray]:
    """Return the images of each split, of one number of channels."""
    import pyarrow as pa

    kind = columns[0].type
    ends = np.cumsum([len(column) for column in columns])
    if isinstance(kind, pa.BaseExtensionType):  # arrays of fixed shape
        columns = [pa.chunked_array([c.storage for c in column.chunks]) for column in columns]
        kind = columns[0].type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if size is not None:
            raise ConfigError(f"column {name!r} has arrays of one shape: expected no size")
        arrays = [_stack_lists(column, name) for column in columns]
        return [array[..., None] if array.ndim == 3 else array for array in arrays]
    files: list[Any] = []
    for column in columns:
        if pa.types.is_struct(kind):
            rows = column.to_pylist()
            files += [row and (row.get("bytes") or row.get("path")) for row in rows]
        else:
            files += column.to_pylist()
    for position, file in enumerate(files):
        if not isinstance(file, bytes | str) or not file:
            raise ConfigError(
                f"column {name!r} has no image in row {position}: expected encoded files or lists "
                f"of pixels, not {kind}"
            )
    images = decode_images(files, lambda i: f"{i} of column {name!r}", size=size, color=None)
    return np.split(images, ends[:-1])


def _stack_lists(column: Any, name: str) -> np.ndarray:
    """Return nested lists of numbers as one array."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = column.combine_chunks()
    shape = [len(values)]
    while pa.types.is_nested(values.type):
        lengths = pc.unique(pc.list_value_length(values)).to_pylist()
        if len(lengths) != 1 or not lengths[0]:
            raise ConfigError(
                f"column {name!r} has lists of {lengths[:5]} items: expected one length"
            )
        shape.append(lengths[0])
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False).reshape(shape)
