"""AG News (Zhang et al., NeurIPS 2015): titles and descriptions of news in four classes."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_het.data.author_files import AuthorDataset
from fedjax_het.data.sources.source import Content, read_file, require_labels
from fedjax_het.data.sources.splits import join_splits
from fedjax_het.utils.errors import ConfigError, summarize_error

_CLASS_NAMES = ("World", "Sports", "Business", "Sci/Tech")
# As in PFLlib's `dataset/generate_AGNews.py`. Never changed: others would be another benchmark.
_LENGTH, _MAX_TOKENS = 200, 32_000
_PADDING, _UNKNOWN = 0, 1
_NUM_SPECIAL = 2
# Replacements of torchtext's tokenizer `basic_english`, in lower case.
_DELETED, _SPACES = re.compile('"'), re.compile("<br />|;|:")
_SINGLE_TOKENS = re.compile(r"([.,'()!?])")


def split_words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, as torchtext's `basic_english`.

    Args:
      text: the text.

    Returns:
      Words in lower case. Quotation marks, colons and semicolons are left out.

    Example:
      >>> from fedjax_het.data.ag_news import split_words
      >>> split_words("Wall St. Bears: a 'real' risk?")
      ['wall', 'st', '.', 'bears', 'a', "'", 'real', "'", 'risk', '?']
    """
    text = _SPACES.sub(" ", _DELETED.sub("", text.lower()))
    return _SINGLE_TOKENS.sub(r" \1 ", text).split()


def _read_split(path: Path) -> tuple[list[list[str]], np.ndarray]:
    """Return the words of each text, and the classes `[N]`."""
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
    return [split_words(" ".join(row[1:])) for row in rows], require_labels(
        path, labels - 1, _CLASS_NAMES
    )


def _read_parquet(path: Path) -> tuple[list[list[str]], np.ndarray]:
    """Read a split as Hugging Face stores it: title and description are one text."""
    import pandas as pd

    try:
        frame = pd.read_parquet(path, columns=["text", "label"])
        labels = frame["label"].to_numpy().astype(np.int64)
    except Exception as error:  # of arbitrary bytes
        reason = summarize_error(error)
        raise ConfigError(f"{path} cannot be read ({reason}): expected text and label") from error
    return [split_words(str(text)) for text in frame["text"]], require_labels(
        path, labels, _CLASS_NAMES
    )


def _number_words(texts: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the numbers of the most frequent words, of equally frequent ones in their order."""
    counts = Counter(word for words in texts for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: _MAX_TOKENS - _NUM_SPECIAL]
    return {word: number for number, word in enumerate(ranked, _NUM_SPECIAL)}


def _read(paths: Mapping[str, Path]) -> Content:
    """Read the authors' splits as the first 200 words of each text, with padding."""
    contents = {s: _read_split(p) for s, p in zip(("train", "test"), paths.values(), strict=True)}
    numbers = _number_words(contents["train"][0])
    arrays = {}
    for split, (texts, labels) in contents.items():
        tokens = np.full((len(texts), _LENGTH), _PADDING, np.int32)
        for row, words in zip(tokens, texts, strict=True):
            known = [numbers.get(word, _UNKNOWN) for word in words[:_LENGTH]]
            row[: len(known)] = known
        arrays[split] = {"inputs": tokens, "labels": labels}
    facts = {"class_names": [*_CLASS_NAMES], "num_tokens": len(numbers) + _NUM_SPECIAL}
    return join_splits(arrays), facts


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
