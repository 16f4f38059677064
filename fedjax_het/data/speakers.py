"""Lines of twenty speakers of Shakespeare's plays: a small text with natural users."""

from importlib import resources

import numpy as np

LENGTH = 40
"""Number of characters of an example."""
_TEST_FRACTION = 0.2


def read_speakers(data_dir=None, cache_dir=None) -> tuple[dict[str, np.ndarray], dict]:
    """Read the text as sequences of 40 characters, with the next character of each as label.

    The text of a speaker is cut into sequences without overlap. The last fifth of the sequences of
    each speaker, rounded up, are test examples, as in LEAF's split by time. Tokens are the numbers
    of the characters in the order of their codes.

    Args:
      data_dir: not used.
      cache_dir: not used.

    Returns:
      `(arrays, meta)`: tokens, next tokens and speakers of both splits by name, and the facts of
      the data set.
    """
    text = resources.files("fedjax_het.data").joinpath("speakers.txt").read_text(encoding="utf-8")
    parts = [part.split("]\n", 1) for part in text.split("[")[1:]]
    characters = sorted(set("".join(lines for _, lines in parts)))
    numbers = {character: i for i, character in enumerate(characters)}
    inputs: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    users: dict[str, list[str]] = {"train": [], "test": []}
    for speaker, lines in parts:
        tokens = np.array([numbers[character] for character in lines.strip()], np.int32)
        starts = np.arange(0, len(tokens) - LENGTH, LENGTH)
        sequences = tokens[starts[:, None] + np.arange(LENGTH + 1)]
        num_train = len(sequences) - int(np.ceil(_TEST_FRACTION * len(sequences)))
        for split, rows in (("train", sequences[:num_train]), ("test", sequences[num_train:])):
            inputs[split].append(rows)
            users[split] += [speaker.title()] * len(rows)
    arrays: dict[str, np.ndarray] = {}
    for split, parts_of_split in inputs.items():
        rows = np.concatenate(parts_of_split)
        arrays |= {f"{split}_inputs": rows[:, :-1], f"{split}_labels": rows[:, 1:]}
        arrays[f"{split}_users"] = np.array(users[split])
    note = "lines of 20 speakers of Shakespeare's plays, 40 characters each"
    tokens_of_text = {"num_tokens": len(characters), "token_names": characters}
    return arrays, {"task": "next_token", "note": note, **tokens_of_text}
