"""Columns of numbers and categories of tables as inputs."""

import decimal
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.data.class_labels import to_indices
from fedjax_het.utils.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

NUMBERS, CATEGORY = "numbers", "category"
"""Names of the arrays of a table with numbers and categories."""
_NUMBER_TYPES = (bool, int, float, decimal.Decimal)
_TRUTH_VALUES = ("true", "false")
_MIN_TOKENS = 2  # of an embedding
_MAX_NUMBER_SHARE = 0.5  # of the texts of a column of categories, without a warning
_MIN_WORDS, _MIN_TEXTS = 3, 20  # mean number of words, and rows, of a column of texts
_log = logging.getLogger("fedjax_het")


def convert_features(
    frames: list["pd.DataFrame"], names: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Convert columns of tables to the inputs of each split.

    Args:
      frames: the table of each split.
      names: columns of numbers and of texts.

    Returns:
      `(inputs, facts)`: for each split an array of numbers, or arrays of numbers and categories by
      name; and the names of features, and of categories with their number.

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
            raise ConfigError(
                f"column {name!r} has missing numbers: expected a number or a truth value in each row"
            )
    numbers = [frame[numeric].to_numpy().astype(np.float32) for frame in frames]
    if not categorical:
        return numbers, {"feature_names": [*map(str, numeric)]}
    columns, token_names = [], list[str]()
    for name in categorical:
        _warn_about_numbers(name, frames)
        _warn_about_texts(name, frames)
        texts = [frame[name].astype(object).fillna("").astype(str).to_numpy() for frame in frames]
        indices, categories = to_indices([array.astype(str) for array in texts])
        columns.append([index + len(token_names) for index in indices])
        token_names += [f"{name}={category}" for category in categories]
    categories_by_split = [np.stack(parts, axis=1) for parts in zip(*columns, strict=True)]
    inputs = [
        {CATEGORY: categories} | ({NUMBERS: own_numbers} if numeric else {})
        for categories, own_numbers in zip(categories_by_split, numbers, strict=True)
    ]
    token_names += [""] * (_MIN_TOKENS - len(token_names))
    feature_names = {CATEGORY: [*map(str, categorical)]}
    return inputs, {
        "num_tokens": {CATEGORY: len(token_names)},
        "feature_names": feature_names | ({NUMBERS: [*map(str, numeric)]} if numeric else {}),
        "token_names": {CATEGORY: token_names},
    }


def _convert_columns(frame: "pd.DataFrame", names: list[str]) -> "pd.DataFrame":
    """Return a table whose columns of numbers, also of large or decimal ones, are floats.

    Raises:
      ConfigError: if a column has neither numbers nor texts.
    """
    import pandas as pd

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
    return pd.DataFrame(converted)


def _warn_about_numbers(name: str, frames: list["pd.DataFrame"]) -> None:
    """Log a warning if most texts of a column of categories are numbers or truth values."""
    import pandas as pd

    texts = pd.Series(pd.concat([frame[name].dropna().astype(str) for frame in frames]).unique())
    is_number = pd.to_numeric(texts, errors="coerce").notna()
    is_number |= texts.str.lower().isin(_TRUTH_VALUES)
    if is_number.mean() > _MAX_NUMBER_SHARE and not is_number.all():
        _log.warning(
            "note: column %r has categories, as it has texts such as %r beside numbers or truth "
            "values",
            name,
            texts[~is_number].iloc[0],
        )


def _warn_about_texts(name: str, frames: list["pd.DataFrame"]) -> None:
    """Log a warning if a column of categories has sentences that differ in most rows."""
    texts = frames[0][name].dropna().astype(str)
    num_words = texts.str.split().str.len().mean()
    is_text = len(texts) >= _MIN_TEXTS and num_words >= _MIN_WORDS
    if is_text and texts.nunique() > len(texts) / 2:
        _log.warning(
            "note: column %r has a category for each of %d texts; the option text=%s makes words "
            "the tokens of the input, in place of all other columns",
            name,
            texts.nunique(),
            name,
        )
