"""Adult, also named Census Income (Kohavi, KDD 1996): a table of numbers and categories."""

from collections.abc import Mapping
from pathlib import Path

from fedjax_het.data.author_files import AuthorDataset, read_frame
from fedjax_het.data.class_labels import to_indices
from fedjax_het.data.sources.features import convert_features
from fedjax_het.data.sources.source import Content
from fedjax_het.data.sources.splits import join_splits
from fedjax_het.utils.errors import ConfigError

_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_CLASS_NAMES = ("<=50K", ">50K")


def _read(paths: Mapping[str, Path]) -> Content:
    """Read the authors' splits; a missing category, `?`, is a category of its own."""
    frames, labels = [], []
    for path in paths.values():
        # The first line of adult.test is a comment, and its labels end with a dot.
        frame = read_frame(
            path, len(_COLUMNS), skipinitialspace=True, comment="|", keep_default_na=False
        )
        frame.columns = [*_COLUMNS]
        for name in _NUMBERS:
            if frame[name].dtype.kind not in "iuf":
                raise ConfigError(f"{path} has texts in column {name!r}: expected numbers")
        texts = frame.pop("income").astype(str).str.removesuffix(".").to_numpy().astype(str)
        try:
            labels += to_indices([texts], _CLASS_NAMES)[0]
        except ConfigError as error:
            raise ConfigError(f"{path}, column 'income': {error}") from error
        frames.append(frame)
    inputs, facts = convert_features(frames, [*_COLUMNS[:-1]])
    splits = zip(("train", "test"), inputs, labels, strict=True)
    arrays = {split: {"inputs": x, "labels": y} for split, x, y in splits}
    return join_splits(arrays), {"class_names": [*_CLASS_NAMES], **facts}


ADULT = AuthorDataset(
    "adult",
    "Adult: 32,561 + 16,281 people, 6 numbers and 8 categories, 2 classes of income",
    ("adult", ""),
    ("adult.data", "adult.test"),
    _read,
    {"model": "tabular_mlp"},
)
"""The table of the UCI repository."""
