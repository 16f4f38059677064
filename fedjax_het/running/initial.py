"""The model that a run begins with, where that is in a file."""

from pathlib import Path
from typing import Any

import jax

from fedjax_het.common.errors import ConfigError, require
from fedjax_het.running.federations import InitialModel
from fedjax_het.running.programs import Signature, build_local_training
from fedjax_het.running.trained import ModelFile, read_model_file
from fedjax_het.settings.spec import ResolvedRunSpec


def load_initial_model(spec: ResolvedRunSpec, signature: Signature) -> InitialModel | None:
    """That which settings name; None where weights are drawn. Raises ConfigError for a file that is
    none, and for the model of another network."""
    if spec.init_from is None:
        return None
    model_file = _read_initial_model(spec.init_from)
    expected_variables = jax.eval_shape(
        build_local_training(signature).task.model.init, jax.random.key(0)
    )
    expected_shapes, file_shapes = (
        _format_leaf_shapes(expected_variables),
        _format_leaf_shapes(model_file.variables),
    )
    for name in {**expected_shapes, **file_shapes}:
        file_shape, expected_shape = (
            file_shapes.get(name, "nothing"),
            expected_shapes.get(name, "nothing"),
        )
        expected = f"a model of this network, {spec.model}, in which {name} is {expected_shape}, not {file_shape}"
        require(file_shape == expected_shape, "init_from", spec.init_from, expected)
    leaves = jax.tree.leaves(model_file.variables)  # of dicts, whose order is that of names
    variables = jax.tree.unflatten(jax.tree.structure(expected_variables), leaves)
    return InitialModel(variables, model_file.variables_digest)


def compute_initial_digest(path: str) -> str:
    """The digest of a file's model; "unknown" where it cannot be read, as the run will say."""
    try:
        return _read_initial_model(path).variables_digest
    except ConfigError:
        return "unknown"


def _read_initial_model(path: str) -> ModelFile:
    try:
        return read_model_file(Path(path))
    except OSError as error:
        expected = f"a model's file, as save_model writes it ({error.strerror})"
        require(False, "init_from", path, expected)
        raise


def _format_leaf_shapes(tree: Any) -> dict[str, str]:
    """Of each leaf, by its place."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype} {leaf.shape}"
        for path, leaf in leaves
    }
