"""A run on disk: one file, replaced whole, from which it continues exactly."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.utils.arrays import decode_arrays, encode_arrays, is_prng_key, to_numpy_bits
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import DamagedFileError, load_checksummed_npz, save_checksummed_npz
from fedjax_het.utils.text import to_one_line

_META_KEY = "__meta__"


def save_checkpoint(path: Path, tree: Any, meta: dict) -> None:
    """Write a pytree of arrays, of any type that jax has, and a JSON-able record, atomically and
    with a checksum of both. Raises OSError.

    The keys of a run's rounds are not among them: they are derived from the seed and the round.
    """
    arrays = encode_arrays(flatten_by_path(tree))
    arrays[_META_KEY] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    save_checksummed_npz(path, arrays)


def read_checkpoint(path: Path) -> tuple[dict, dict[str, Any]]:
    """The record of a checkpoint, and its arrays by name. Raises DamagedFileError, in one line, if
    the file is none, or is not as it was written."""
    try:
        arrays = load_checksummed_npz(path)
        meta = json.loads(arrays.pop(_META_KEY).tobytes())
        return meta, decode_arrays(arrays)
    except Exception as error:  # of arbitrary bytes
        reason = str(error) if isinstance(error, DamagedFileError) else type(error).__name__
        raise make_damaged_checkpoint_error(path, reason) from error


def read_meta(path: Path) -> dict:
    """The record of a checkpoint alone."""
    return read_checkpoint(path)[0]


def load_checkpoint(path: Path, template: Any) -> Any:
    """The pytree of a checkpoint, in the structure of `like`. Raises ConfigError on any misfit."""
    _, arrays = read_checkpoint(path)
    leaves = []
    for name, leaf in flatten_by_path(template).items():
        array = arrays.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ConfigError(
                f"checkpoint = {str(path)!r}: expected {name} of shape {leaf.shape} and type "
                f"{leaf.dtype}, as this configuration has; it is another configuration's"
            )
        leaves.append(array)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(template), leaves)


def nonfinite_array_names(arrays: dict[str, Any]) -> list[str]:
    """The names of arrays, of those that `flatten_by_path` gives, that hold what is no number."""
    return [
        name
        for name, leaf in arrays.items()
        if not is_prng_key(leaf)
        and jnp.issubdtype(leaf.dtype, jnp.inexact)
        and not np.isfinite(to_numpy_bits(leaf)).all()
    ]


def flatten_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their place in it, as a checkpoint names them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def make_damaged_checkpoint_error(path: Path, reason: str) -> DamagedFileError:
    """The error of a checkpoint that cannot be used, with what is to be done."""
    return DamagedFileError(
        to_one_line(
            f"checkpoint = {str(path)!r}: expected a checkpoint of this program, but it is damaged "
            f"and cannot be read ({reason}); remove it to start afresh"
        )
    )
