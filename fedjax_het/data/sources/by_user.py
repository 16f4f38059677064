"""Examples that are stored by user, as in LEAF and TensorFlow Federated."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from fedjax_het.data.sources.splits import SplitArrays
from fedjax_het.utils.errors import ConfigError

USER_ORDER = "user"
"""Order of the examples by user, and as in the files for each user."""
_TOLERANCE = 1e-3  # of a gray level: float32 represents each level to 2e-5


class UserExamples(NamedTuple):
    """Inputs `[N, ...]` and labels of one user.

    Inputs are images `[N, H, W, C]` in 0..255 or [0, 1], tokens `[N, T]`, features `[N, F]` or
    series `[N, T, F]`.
    """

    user: str
    inputs: np.ndarray
    labels: np.ndarray


def join_users(splits: Mapping[str, Iterable[UserExamples]]) -> SplitArrays:
    """Concatenate the examples of all users of each split.

    Floats become uint8 if each is k / 255 for an integer k, as in FEMNIST. Equal images then have
    equal arrays in every format. Otherwise all images become float32.

    Args:
      splits: the examples of each user, in the order of the result, by the name of the split.

    Returns:
      For each split, `inputs` `[N, ...]`, `labels` `[N]` or `[N, T]`, and `users` text `[N]`.

    Raises:
      ConfigError: if a split has no example, or if shapes differ.
    """
    arrays = {split: _join_users(users) for split, users in splits.items()}
    if any(part["inputs"].dtype != np.uint8 for part in arrays.values()):
        for part in arrays.values():
            part["inputs"] = _to_floats(part["inputs"])
    return arrays


def _join_users(users: Iterable[UserExamples]) -> dict[str, np.ndarray]:
    """Return the arrays of one split."""
    examples = [
        UserExamples(u, _to_pixels(inputs), labels) for u, inputs, labels in users if len(labels)
    ]
    if not examples:
        raise ConfigError("no user has an example")
    first = examples[0]
    for user, inputs, labels in examples:
        if len(inputs) != len(labels):
            raise ConfigError(f"user {user!r} has {len(inputs)} inputs and {len(labels)} labels")
        if inputs.shape[1:] != first.inputs.shape[1:]:
            raise ConfigError(
                f"user {user!r} has inputs {inputs.shape[1:]}: expected {first.inputs.shape[1:]} as "
                f"user {first.user!r}"
            )
    parts = [each.inputs for each in examples]
    if any(array.dtype != np.uint8 for array in parts):
        parts = [_to_floats(array) for array in parts]
    return {
        "inputs": np.concatenate(parts),
        "labels": np.concatenate([each.labels for each in examples]),
        "users": np.repeat(
            [each.user for each in examples], [len(each.labels) for each in examples]
        ),
    }


def guess_shape(num_pixels: int) -> tuple[int, int, int] | None:
    """Return the shape (H, W, C) of square images, gray or of three channels.

    Args:
      num_pixels: number of values of an image.

    Returns:
      The shape; None if there is no such shape.
    """
    for channels in (1, 3):
        side = math.isqrt(num_pixels // channels)
        if side * side * channels == num_pixels:
            return side, side, channels
    return None


def _to_floats(inputs: np.ndarray) -> np.ndarray:
    return inputs / np.float32(255) if inputs.dtype == np.uint8 else inputs


def to_levels(values: np.ndarray) -> np.ndarray | None:
    """Return values as uint8 pixels if they are integers in 0..255, or these divided by 255.

    Args:
      values: integers or floats.

    Returns:
      The pixels; None for other values.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.sources.by_user import to_levels
      >>> to_levels(np.array([0.2, 1.0])).tolist(), to_levels(np.array([0.3, -1.0]))
      ([51, 255], None)
    """
    scaled = values.astype(np.float64) * (1 if np.issubdtype(values.dtype, np.integer) else 255)
    if not (scaled.min() >= 0 and scaled.max() <= 255 + _TOLERANCE):
        return None
    levels = np.rint(scaled)
    is_exact = np.abs(scaled - levels).max() < _TOLERANCE
    return levels.astype(np.uint8) if is_exact else None


def _to_pixels(inputs: np.ndarray) -> np.ndarray:
    """Return images as uint8 or float32, and other inputs as they are."""
    if inputs.ndim < 4:
        return inputs
    levels = to_levels(inputs)
    return inputs.astype(np.float32) if levels is None else levels
