"""A run on disk: one file, replaced whole, from which it continues exactly."""

import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_het.common.arrays import from_file, to_file
from fedjax_het.common.errors import ConfigError
from fedjax_het.common.files import write_atomically

_META = "__meta__"


def save_checkpoint(path: Path, tree: Any, meta: dict) -> None:
    """Write a pytree of arrays, of any type that jax has, and a JSON-able record, atomically.

    The keys of a run's rounds are not among them: they are derived from the seed and the round.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    arrays = to_file({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    arrays[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def read_meta(path: Path) -> dict:
    """The record of a checkpoint. Raises ConfigError if the file is none."""
    try:
        with np.load(path, allow_pickle=False) as data:
            return json.loads(data[_META].tobytes())
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"checkpoint = {str(path)!r}: expected a checkpoint of this program, "
            f"but it cannot be read ({type(error).__name__}); remove it to start afresh"
        ) from error


def load_checkpoint(path: Path, like: Any) -> Any:
    """The pytree of a checkpoint, in the structure of `like`. Raises ConfigError on any misfit."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    with np.load(path, allow_pickle=False) as data:
        arrays = from_file(data)
    found = []
    for key, leaf in leaves:
        name = jax.tree_util.keystr(key)
        array = arrays.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ConfigError(
                f"checkpoint = {str(path)!r}: expected {name} of shape {leaf.shape} and type "
                f"{leaf.dtype}, as this configuration has; it is another configuration's"
            )
        found.append(array)
    return jax.tree_util.tree_unflatten(structure, found)
