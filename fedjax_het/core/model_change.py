"""The change of the model in the upload of a client."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

Tree = Any


def find_model_change(mean: Tree, params: Tree) -> tuple[Tree, Callable[[Tree], Tree]] | None:
    """Find the part of an update's mean that has the structure of the model's parameters.

    Args:
      mean: `ClientUpdate.mean`: nested tuples and dictionaries.
      params: the parameters; only their tree structure is read.

    Returns:
      The first such part, and a function that returns `mean` with another value of the part; None
      if there is no such part.

    Example:
      >>> from fedjax_het.core.model_change import find_model_change
      >>> change, replace = find_model_change({"params": [1.0], "state": {}}, [0.0])
      >>> change, replace([2.0])
      ([1.0], {'params': [2.0], 'state': {}})
    """
    # jax's stub does not declare that tree structures can be compared.
    is_like_params = jax.tree.structure(mean) == jax.tree.structure(params)  # type: ignore[operator]
    if is_like_params and jax.tree.leaves(mean):
        return mean, lambda part: part
    places: list[Any] = []
    if isinstance(mean, dict):
        places = ["params"] if "params" in mean else list(mean)
    elif isinstance(mean, tuple):
        places = list(range(len(mean)))
    for place in places:
        found = find_model_change(mean[place], params)
        if found is not None:
            change, replace = found
            return change, partial(_replace_item, mean, place, replace)
    return None


def _replace_item(tree: Any, place: Any, replace: Callable[[Tree], Tree], part: Tree) -> Tree:
    """Return a tuple or dictionary with `replace(part)` in one place."""
    if isinstance(tree, dict):
        return {**tree, place: replace(part)}
    items = [replace(part) if i == place else item for i, item in enumerate(tree)]
    return tree._make(items) if hasattr(tree, "_make") else tuple(items)
