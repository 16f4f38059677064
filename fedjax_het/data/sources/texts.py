"""Texts as sequences of tokens: words or characters."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

TextUnit = Literal["words", "characters"]
# As in PFLlib's `dataset/generate_AGNews.py`. Never changed: others would be another benchmark.
DEFAULT_LENGTH, DEFAULT_NUM_TOKENS = 200, 32_000
"""Default numbers of tokens of a text, and of different tokens."""
PADDING, UNKNOWN = 0, 1
"""Tokens after the end of a text, and of words outside the vocabulary."""
NUM_SPECIAL = 2
"""Number of tokens that are no words."""
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
      >>> from fedjax_het.data.sources.texts import split_words
      >>> split_words("Wall St. Bears: a 'real' risk?")
      ['wall', 'st', '.', 'bears', 'a', "'", 'real', "'", 'risk', '?']
    """
    text = _SPACES.sub(" ", _DELETED.sub("", text.lower()))
    return _SINGLE_TOKENS.sub(r" \1 ", text).split()


def encode_texts(
    splits: Sequence[Sequence[str]],
    unit: TextUnit = "words",
    length: int = DEFAULT_LENGTH,
    max_tokens: int = DEFAULT_NUM_TOKENS,
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Replace the words or characters of texts by tokens.

    The vocabulary has the most frequent words of the first split, of equally frequent ones in
    alphabetical order.

    Args:
      splits: texts of each split; the first split is for training.
      unit: "words" as `split_words` returns them, or "characters".
      length: number of tokens of a text, T; longer texts are cut, shorter ones padded.
      max_tokens: maximum number of different tokens.

    Returns:
      `(tokens, vocabulary)`: tokens of each split, int32 `[N, T]`, and the text of each token.
      Token 0, "", is padding, and token 1, "?", another word.

    Example:
      >>> from fedjax_het.data.sources.texts import encode_texts
      >>> (tokens,), vocabulary = encode_texts([["To be, or", "to see"]], length=5)
      >>> vocabulary
      ('', '?', 'to', ',', 'be', 'or', 'see')
      >>> tokens.tolist()
      [[2, 4, 3, 5, 0], [2, 6, 0, 0, 0]]
    """
    split = split_words if unit == "words" else list
    parts = [[split(text) for text in texts] for texts in splits]
    counts = Counter(word for words in parts[0] for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: max_tokens - NUM_SPECIAL]
    numbers = {word: number for number, word in enumerate(ranked, NUM_SPECIAL)}
    arrays = []
    for texts in parts:
        tokens = np.full((len(texts), length), PADDING, np.int32)
        for row, words in zip(tokens, texts, strict=True):
            known = [numbers.get(word, UNKNOWN) for word in words[:length]]
            row[: len(known)] = known
        arrays.append(tokens)
    return arrays, ("", "?", *ranked)
