"""Characters of Shakespeare's texts as tokens of LEAF and of TensorFlow Federated.

The vocabularies are fixed, so that tokens do not depend on the files.
"""

from collections.abc import Sequence

import numpy as np

LEAF_CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
"""Characters of LEAF's `models/utils/language_utils.py`; tokens are their positions."""
_TFF_CHARACTERS = (
    "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
)
# Padding is token 0, so that characters count from 1.
_UNKNOWN, _START, _END = (len(_TFF_CHARACTERS) + i for i in (1, 2, 3))
TFF_NUM_TOKENS = _END + 1
"""Number of tokens of TensorFlow Federated: characters, padding, unknown, start and end."""
TFF_LENGTH = 80
"""Number of characters of an example."""


def _make_table(characters: str, first: int, other: int) -> np.ndarray:
    """Return the token of each code below 256, int32 `[256]`."""
    table = np.full(256, other, np.int32)
    table[[ord(character) for character in characters]] = np.arange(len(characters)) + first
    return table


# LEAF's one-hot labels assign characters outside the vocabulary to its last one, as does this.
_LEAF_TABLE = _make_table(LEAF_CHARACTERS, 0, len(LEAF_CHARACTERS) - 1)
_TFF_TABLE = _make_table(_TFF_CHARACTERS, 1, _UNKNOWN)


def encode_leaf(texts: np.ndarray) -> np.ndarray:
    """Replace the characters of texts by their positions in LEAF's vocabulary.

    Args:
      texts: texts of one length T, `[N]`. A character outside the vocabulary becomes the last one.

    Returns:
      Tokens, int32 `[N, T]`.

    Raises:
      ValueError: if the lengths differ.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.sources.characters import encode_leaf
      >>> encode_leaf(np.array([" !A", "}b."])).tolist()
      [[1, 2, 25], [79, 54, 10]]
    """
    lengths = np.unique(np.char.str_len(texts))
    if len(lengths) != 1 or not lengths[0]:
        raise ValueError(f"texts have {lengths.tolist()[:5]} characters: expected one length")
    codes = np.ascontiguousarray(texts.astype(f"<U{lengths[0]}")).view("<u4")
    return _LEAF_TABLE[np.minimum(codes, 255)].reshape(len(texts), -1)


def encode_snippets(snippets: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Cut snippets into sequences of 80 characters, with the next character of each as label.

    A start and an end are added to each snippet, and it is padded to a multiple of 81 tokens. Each
    81 tokens are an example: the first 80 are its input and the last 80 its labels, as in
    `create_preprocess_fn` of TensorFlow Federated. The label of padding is -1, which losses and
    scores ignore.

    Args:
      snippets: texts of a user; a token is a byte.

    Returns:
      Tokens and labels, int32 `[N, 80]`.

    Example:
      >>> from fedjax_het.data.sources.characters import encode_snippets
      >>> tokens, labels = encode_snippets([b"Hark!"])
      >>> tokens[0, :8].tolist(), labels[0, :8].tolist()
      ([88, 9, 64, 46, 23, 79, 89, 0], [9, 64, 46, 23, 79, 89, -1, -1])
    """
    sequences = [np.zeros((0, TFF_LENGTH + 1), np.int32)]
    for snippet in snippets:
        characters = _TFF_TABLE[np.frombuffer(snippet, np.uint8)]
        tokens = np.concatenate([[_START], characters, [_END]])
        padded = np.pad(tokens, (0, -len(tokens) % (TFF_LENGTH + 1)))
        sequences.append(padded.reshape(-1, TFF_LENGTH + 1))
    rows = np.concatenate(sequences).astype(np.int32)
    labels = np.where(rows[:, 1:] == 0, -1, rows[:, 1:]).astype(np.int32)
    return np.ascontiguousarray(rows[:, :-1]), labels
