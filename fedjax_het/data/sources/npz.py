"""Archives of arrays that `numpy.savez` writes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_het.data.sources.source import FILE_ORDER, Content, Source
from fedjax_het.data.validation import move_channels_last
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, suggest_name, summarize_error

# Names of arrays in the archive, by their names in `dataset_from_arrays`.
_NAMES = {
    "train_inputs": ("x_train", "train_inputs", "train_images"),
    "train_labels": ("y_train", "train_labels"),
    "test_inputs": ("x_test", "test_inputs", "test_images"),
    "test_labels": ("y_test", "test_labels"),
    "train_users": ("client_train", "train_users"),
    "test_users": ("client_test", "test_users"),
    "train_domains": ("domain_train", "train_domains"),
    "test_domains": ("domain_test", "test_domains"),
}
_NUM_REQUIRED = 4
_OTHER_NAMES = ("class_names", "domain_names", "task", "num_tokens")
_log = logging.getLogger("fedjax_het")


def read_npz_dataset(
    location: str,
    cache_dir: Any = None,
    *,
    channels: Literal["first", "last"] | None = None,
    series: bool | None = None,
    task: str | None = None,
    num_tokens: PositiveInt | None = None,
) -> Content:
    """Read inputs and labels from an archive of NumPy.

    The archive has `x_train`, `y_train`, `x_test` and `y_test`, as in Keras, or `train_images`,
    `train_labels`, `test_images` and `test_labels`, as in MedMNIST. `train_inputs` and
    `test_inputs`, the names of this package, are accepted, too. Labels `[N, 1]` lose their last
    axis. Labels and domains may be texts. Optional arrays are `client_train`, `client_test`,
    `domain_train`, `domain_test`, `class_names`, `domain_names`, `task` and `num_tokens`.

    Args:
      location: path of the file.
      cache_dir: not used.
      channels: "first" for images `[N, C, H, W]`. Default: "last".
      series: whether arrays with three axes are series `[N, T, F]` or gray images `[N, H, W]`.
        Default: uint8 and uint16 are gray images, floats are series.
      task: name of the task. Default: the array `task`, otherwise "classification".
      num_tokens: number of different tokens of inputs `[N, T]`. Default: the array `num_tokens`;
        without it inputs are numbers.

    Returns:
      `(arrays, meta)`.

    Raises:
      ConfigError: if the file is missing or damaged, if an array is missing, or if an array has
        objects instead of numbers.
    """
    stored = _load(Path(location))
    keys = {
        name: next((alias for alias in aliases if alias in stored), None)
        for name, aliases in _NAMES.items()
    }
    missing = [
        aliases[0]
        for aliases in list(_NAMES.values())[:_NUM_REQUIRED]
        if not {*aliases} & stored.keys()
    ]
    if missing:
        raise ConfigError(
            f"{location} has no {', '.join(missing)}: expected x_train, y_train, x_test and y_test "
            f"(it has {', '.join(sorted(stored)) or 'no arrays'})"
        )
    arrays = {name: stored[key] for name, key in keys.items() if key is not None}
    for name in ("train_inputs", "test_inputs"):
        inputs = arrays[name]
        if inputs.ndim == 3 and series is not None:
            inputs = inputs.astype(np.float32) if series else inputs[..., None]
        arrays[name] = move_channels_last(keys[name] or name, inputs, channels)
    _warn_about_unknown_arrays(location, stored)
    argument_names = {name: key or _NAMES[name][0] for name, key in keys.items()}
    meta: dict[str, Any] = {"source": "npz", "order": FILE_ORDER, "argument_names": argument_names}
    for name, option, convert in (("task", task, str), ("num_tokens", num_tokens, int)):
        if (value := _get_scalar(location, stored, name, convert, option)) is not None:
            meta[name] = value
    for names in ("class_names", "domain_names"):
        meta[names] = tuple(map(str, stored.get(names, ())))
    return arrays, meta


def _warn_about_unknown_arrays(location: str, stored: dict[str, np.ndarray]) -> None:
    """Log the arrays that have no meaning, with the name that is near."""
    known = {*(alias for aliases in _NAMES.values() for alias in aliases), *_OTHER_NAMES}
    for name in sorted(stored.keys() - known):
        suggestion = suggest_name(name, known - stored.keys())
        advice = "" if suggestion is None else f": did you mean {suggestion!r}?"
        _log.warning("note: %s: array %r is not read%s", location, name, advice)


def _get_scalar(
    location: str, stored: dict[str, np.ndarray], name: str, convert: Callable, option: Any
) -> Any:
    """Return the user's option, or else the stored value; None without both."""
    if option is not None or name not in stored:
        return option
    try:
        return convert(stored[name].item())
    except ValueError as error:
        shape, dtype = stored[name].shape, stored[name].dtype
        expected = "one value, as np.array(60)" if convert is int else "one text"
        raise ConfigError(f"{location}: {name} is {dtype} {shape}: expected {expected}") from error


def _load(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an archive."""
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ConfigError(f"{path} has one array: expected an archive of np.savez")
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise ConfigError(f"no file {path}") from error
    except ConfigError:
        raise
    except Exception as error:  # NumPy parses headers with Python's tokenizer
        reason = summarize_error(error)
        if "allow_pickle" in str(error) or "pickled" in str(error):
            reason = "it has Python objects; array.astype(str) makes texts of them"
        raise ConfigError(
            f"{path} cannot be read ({reason}): expected an archive of numbers and texts, as "
            "np.savez writes it"
        ) from error


SOURCE = Source(
    "npz",
    "npz:FILE, an archive of NumPy with x_train, y_train, x_test and y_test",
    read=read_npz_dataset,
)
