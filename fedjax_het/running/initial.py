"""The model that a run begins with, where that is in a file."""

from pathlib import Path
from typing import Any

import jax

from fedjax_het.common.errors import ConfigError, require
from fedjax_het.running.federations import Initial
from fedjax_het.running.programs import Signature, training_of
from fedjax_het.running.trained import KeptModel, read_model
from fedjax_het.settings.spec import ResolvedSpec


def initial_of(spec: ResolvedSpec, signature: Signature) -> Initial | None:
    """That which settings name; None where weights are drawn. Raises ConfigError for a file that is
    none, and for the model of another network."""
    if spec.init_from is None:
        return None
    kept = _read(spec.init_from)
    like = jax.eval_shape(training_of(signature).task.model.init, jax.random.key(0))
    ours, theirs = _shapes(like), _shapes(kept.variables)
    for name in {**ours, **theirs}:
        then, now = theirs.get(name, "nothing"), ours.get(name, "nothing")
        expected = f"a model of this network, {spec.model}, in which {name} is {now}, not {then}"
        require(then == now, "init_from", spec.init_from, expected)
    leaves = jax.tree.leaves(kept.variables)  # of dicts, whose order is that of names
    variables = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return Initial(variables, kept.digest)


def initial_digest(path: str) -> str:
    """The digest of a file's model; "unknown" where it cannot be read, as the run will say."""
    try:
        return _read(path).digest
    except ConfigError:
        return "unknown"


def _read(path: str) -> KeptModel:
    try:
        return read_model(Path(path))
    except OSError as error:
        expected = f"a model's file, as save_model writes it ({error.strerror})"
        require(False, "init_from", path, expected)
        raise


def _shapes(tree: Any) -> dict[str, str]:
    """Of each leaf, by its place."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype} {leaf.shape}"
        for path, leaf in leaves
    }
