"""Which of a network's variables belong to its normalisation layers."""

from collections.abc import Sequence
from typing import Any

import jax

from fedjax_het.nn.models import Model, Variables

Tree = Any


def norm_mask(model: Model, variables: Variables) -> Tree:
    """True where a leaf of `variables` is a scale, a shift or a running statistic of a
    normalisation layer: a tree of bools of the same structure.

    By the kind of layer that made it, see `Model.norm_layers`: a layer's name may say nothing, and
    a shortcut's is easily missed.
    """
    layers = model.norm_layers()

    def is_norm_leaf(path, leaf):
        inner = path[1:]  # without "params" or "state"
        names = tuple(jax.tree_util.keystr(inner, simple=True, separator="/").split("/"))
        return any(names[: len(layer)] == layer for layer in layers)

    return jax.tree_util.tree_map_with_path(is_norm_leaf, variables)


def get_norm_variables(model: Model, variables: Variables) -> tuple[jax.Array, ...]:
    """The leaves that `norm_mask` marks, in order."""
    leaves, marks = jax.tree.leaves(variables), jax.tree.leaves(norm_mask(model, variables))
    return tuple(leaf for leaf, mark in zip(leaves, marks, strict=True) if mark)


def replace_norm_variables(
    model: Model, variables: Variables, norms: Sequence[jax.Array]
) -> Variables:
    """`variables` with these in place of the leaves that `norm_mask` marks."""
    leaves, structure = jax.tree.flatten(variables)
    marks = jax.tree.leaves(norm_mask(model, variables))
    norm_values = iter(norms)
    merged = [next(norm_values) if mark else leaf for leaf, mark in zip(leaves, marks, strict=True)]
    return jax.tree.unflatten(structure, merged)
