"""AG News (Zhang et al., NeurIPS 2015): titles and descriptions of news in four classes."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedjax_het.data.author_files import AuthorDataset
from fedjax_het.data.sources.source import Content, read_file, require_labels
from fedjax_het.data.sources.splits import join_splits
from fedjax_het.data.sources.texts import encode_texts
from fedjax_het.utils.errors import ConfigError, summarize_error

_CLASS_NAMES = ("World", "Sports", "Business", "Sci/Tech")


def _read_split(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the texts, and the classes `[N]`."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        lines = io.StringIO(read_file(path).decode("utf-8"), newline="")
        rows = [row for row in csv.reader(lines, strict=True) if row]
        labels = np.array([int(row[0]) for row in rows])
        is_valid = len(rows) > 0 and all(len(row) == 3 for row in rows)
    except (UnicodeDecodeError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): expected lines of class, title and description"
        ) from error
    if not is_valid:
        raise ConfigError(f"{path}: expected lines of class, title and description")
    return [" ".join(row[1:]) for row in rows], require_labels(path, labels - 1, _CLASS_NAMES)


def _read_parquet(path: Path) -> tuple[list[str], np.ndarray]:
    """Read a split as Hugging Face stores it: title and description are one text."""
    import pandas as pd

    try:
        frame = pd.read_parquet(path, columns=["text", "label"])
        labels = frame["label"].to_numpy().astype(np.int64)
    except Exception as error:  # of arbitrary bytes
        reason = summarize_error(error)
        raise ConfigError(f"{path} cannot be read ({reason}): expected text and label") from error
    return [str(text) for text in frame["text"]], require_labels(path, labels, _CLASS_NAMES)


def _read(paths: Mapping[str, Path]) -> Content:
    """Read the authors' splits as the first 200 words of each text, with padding."""
    contents = {s: _read_split(p) for s, p in zip(("train", "test"), paths.values(), strict=True)}
    tokens, vocabulary = encode_texts([texts for texts, _ in contents.values()])
    arrays = {
        split: {"inputs": own_tokens, "labels": labels}
        for (split, (_, labels)), own_tokens in zip(contents.items(), tokens, strict=True)
    }
    facts = {"num_tokens": len(vocabulary), "token_names": vocabulary}
    return join_splits(arrays), {"class_names": [*_CLASS_NAMES], **facts}


AG_NEWS = AuthorDataset(
    "ag_news",
    "AG News: 120,000 + 7,600 texts of 200 words at most, 4 classes",
    ("ag_news_csv", "ag_news", ""),
    ("train.csv", "test.csv"),
    _read,
    {"model": "fasttext"},
    other_files=tuple(f"data/{s}-00000-of-00001.parquet" for s in ("train", "test")),
)
"""The tables of class, title and description."""
