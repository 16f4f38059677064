"""Variables as flax has them, by collections, and as `Model` has them: parameters and state."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_het.common.errors import ConfigError
from fedjax_het.nn.models import Variables

TRAINING_FLAGS = ("train", "training", "deterministic")  # what functions call the training flag


def find_training_flag(parameters: Mapping[str, Any]) -> str | None:
    """The parameter of a function that says whether it is training, if it has one."""
    return next((name for name in TRAINING_FLAGS if name in parameters), None)


def make_flag_arguments(flag: str | None, train: bool) -> dict[str, bool]:
    """The training flag as keyword arguments."""
    if flag is None:
        return {}
    return {flag: not train if flag == "deterministic" else train}


def list_state_collections(by_collection: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the collections besides the parameters, sorted."""
    return tuple(sorted(name for name in by_collection if name != "params"))


def to_variables(by_collection: Mapping[str, Any], collections: Sequence[str]) -> Variables:
    """`Model`'s form. The state is the one collection besides the parameters; of several, a dict.

    Raises: ConfigError naming a leaf that is no array, or a parameter that holds no floats.
    """
    params = by_collection["params"]
    _check_leaves("params", params, floats=True)
    return {"params": params, "state": to_state(by_collection, collections)}


def to_state(by_collection: Mapping[str, Any], collections: Sequence[str]) -> Any:
    """The state alone. Raises: ConfigError naming a leaf that is no array."""
    state = {name: by_collection[name] for name in collections}
    _check_leaves("state", state, floats=False)
    return state[collections[0]] if len(collections) == 1 else state


def to_collections(variables: Variables, collections: Sequence[str]) -> dict[str, Any]:
    """The inverse of `to_variables`."""
    state = variables["state"]
    state = {collections[0]: state} if len(collections) == 1 else state
    return {"params": variables["params"], **state}


def _check_leaves(kind: str, tree: Any, *, floats: bool) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if is_array and not (floats and not np.issubdtype(leaf.dtype, np.inexact)):
            continue
        actual = f"of type {leaf.dtype}" if is_array else f"a {type(leaf).__name__}"
        expected = "an array of floats" if floats else "an array"
        location = jax.tree_util.keystr(path)
        raise ConfigError(f"{kind}{location} of its variables is {actual}: expected {expected}")
