"""A run on disk: one file, replaced whole, from which it continues exactly."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.common.arrays import bits, from_file, is_key, to_file
from fedjax_het.common.errors import ConfigError
from fedjax_het.common.files import DamagedFileError
from fedjax_het.common.sealed import read_sealed, write_sealed
from fedjax_het.common.text import one_line

_META = "__meta__"


def save_checkpoint(path: Path, tree: Any, meta: dict) -> None:
    """Write a pytree of arrays, of any type that jax has, and a JSON-able record, atomically and
    with a checksum of both. Raises OSError.

    The keys of a run's rounds are not among them: they are derived from the seed and the round.
    """
    arrays = to_file(arrays_by_name(tree))
    arrays[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    write_sealed(path, arrays)


def read_checkpoint(path: Path) -> tuple[dict, dict[str, Any]]:
    """The record of a checkpoint, and its arrays by name. Raises DamagedFileError, in one line, if
    the file is none, or is not as it was written."""
    try:
        arrays = read_sealed(path)
        meta = json.loads(arrays.pop(_META).tobytes())
        return meta, from_file(arrays)
    except Exception as error:  # of arbitrary bytes
        what = str(error) if isinstance(error, DamagedFileError) else type(error).__name__
        raise damaged(path, what) from error


def read_meta(path: Path) -> dict:
    """The record of a checkpoint alone."""
    return read_checkpoint(path)[0]


def load_checkpoint(path: Path, like: Any) -> Any:
    """The pytree of a checkpoint, in the structure of `like`. Raises ConfigError on any misfit."""
    _, arrays = read_checkpoint(path)
    found = []
    for name, leaf in arrays_by_name(like).items():
        array = arrays.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ConfigError(
                f"checkpoint = {str(path)!r}: expected {name} of shape {leaf.shape} and type "
                f"{leaf.dtype}, as this configuration has; it is another configuration's"
            )
        found.append(array)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), found)


def not_finite(arrays: dict[str, Any]) -> list[str]:
    """The names of arrays, of those that `arrays_by_name` gives, that hold what is no number."""
    return [
        name
        for name, leaf in arrays.items()
        if not is_key(leaf)
        and jnp.issubdtype(leaf.dtype, jnp.inexact)
        and not np.isfinite(bits(leaf)).all()
    ]


def arrays_by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their place in it, as a checkpoint names them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def damaged(path: Path, what: str) -> DamagedFileError:
    """The error of a checkpoint that cannot be used, with what is to be done."""
    return DamagedFileError(
        one_line(
            f"checkpoint = {str(path)!r}: expected a checkpoint of this program, but it is damaged "
            f"and cannot be read ({what}); remove it to start afresh"
        )
    )
