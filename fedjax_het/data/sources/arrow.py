"""Columns of Arrow tables, as Hugging Face datasets and parquet files have them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedjax_het.utils.errors import ConfigError


class ArrowColumns(Mapping[str, Any]):
    """The columns of a `pyarrow.Table` as arrays, lists and pandas series, converted on access.

    Nested lists of numbers become arrays `[N, ...]`. Encoded files, bytes or a structure of bytes
    and path as in Hugging Face datasets, become a list. Other structures become dictionaries.

    Args:
      table: the table.

    Example:
      >>> import pyarrow as pa
      >>> from fedjax_het.data.sources.arrow import ArrowColumns
      >>> ArrowColumns(pa.table({"tokens": [[1, 2], [3, 4]]}))["tokens"].shape
      (2, 2)
    """

    def __init__(self, table: Any):
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return _convert_column(self._table[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.column_names)

    def __len__(self) -> int:
        return len(self._table.column_names)

    def __contains__(self, name: object) -> bool:
        return name in self._table.column_names


def read_column_types(table: Any) -> dict[str, Any]:
    """Return the types of columns that Hugging Face datasets store in a table, by column.

    Args:
      table: a `pyarrow.Table`.

    Returns:
      Dictionaries with `_type`, and `names` for classes; {} for other tables.
    """
    try:
        stored = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in stored.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _convert_column(column: Any, name: str) -> Any:
    import pyarrow as pa

    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):  # arrays of fixed shape
        column = pa.chunked_array([c.storage for c in column.chunks], kind.storage_type)
        kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _stack_lists(column, name)
    if pa.types.is_struct(kind):
        rows = column.to_pylist()
        if {field.name for field in kind} <= {"bytes", "path"}:
            return [row and (row.get("bytes") or row.get("path")) for row in rows]
        return rows
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    return column.to_pandas()


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
