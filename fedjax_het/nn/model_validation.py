"""Checks of a network before anything compiles."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.nn.model import Model
from fedjax_het.utils.errors import ConfigError

_BATCH_SIZE = 2


@contextmanager
def reraise_as_config_error(owner: str, step: str):
    """Raise each exception from inside as a one-line ConfigError that names network and step.

    Args:
      owner: the network, for the message.
      step: the operation that the code inside does, for the message.

    Returns:
      A context manager without a value.

    Raises:
      ConfigError: if the code inside raises an exception.
    """
    try:
        yield
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(owner) else f"{owner}: {text}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{owner}: {step} fails ({type(error).__name__}: {reason})") from error


def check_model(model: Model, owner: str, function: str, num_classes: int) -> None:
    """Check by shapes alone that a model maps images of its `input_shape` to logits.

    Cost: two abstract evaluations.

    Args:
      model: the network.
      owner: the network, for messages.
      function: the user's function, for messages.
      num_classes: expected number of logits.

    Raises:
      ConfigError: if a call fails; if logits are not floats `[B, num_classes]`; if features are not
        `[B, F]`; or if the state changes its structure, a shape or a dtype.
    """
    images = jax.ShapeDtypeStruct((_BATCH_SIZE, *model.input_shape), jnp.result_type(float))
    key = jax.random.key(0)
    with reraise_as_config_error(owner, f"init of {function}"):
        variables = jax.eval_shape(model.init, key)
    for train in (False, True):
        step = f"{function} of images {images.shape} with train={train}"
        # Only training draws dropout masks.
        key_argument = {"key": key} if train else {}

        def apply_model(variables, images, key_argument=key_argument, train=train):
            return model.apply(variables, images, train=train, **key_argument)

        with reraise_as_config_error(owner, step):
            logits, state = _eval_shapes(apply_model, variables, images)
        _check_logits(logits, f"{owner}: {step}", (_BATCH_SIZE, num_classes))
        _check_state(variables["state"], state, f"{owner}: {step}")
        if model.embed is not None:

            def compute_features(
                variables, images, embed=model.embed, key_argument=key_argument, train=train
            ):
                return embed(variables, images, train=train, **key_argument)[0]

            with reraise_as_config_error(owner, step):
                features = jax.eval_shape(compute_features, variables, images)
            _check_features(features, f"{owner}: {step}")


def _eval_shapes(function: Callable, *arguments: Any) -> Any:
    """Evaluate shapes with `jax.eval_shape`, or return outputs that are not arrays as they are."""
    non_array_outputs: list[Any] = []

    def capture_non_arrays(*arguments: Any) -> Any:
        out = function(*arguments)
        leaves = jax.tree.leaves(out)
        if all(isinstance(leaf, jax.Array) or hasattr(leaf, "dtype") for leaf in leaves):
            return out
        non_array_outputs.append(out)
        return ()

    shapes = jax.eval_shape(capture_non_arrays, *arguments)
    return non_array_outputs[0] if non_array_outputs else shapes


def _check_logits(logits: Any, step: str, expected: tuple[int, int]) -> None:
    """Raise ConfigError unless the logits are floats of the expected shape."""
    shape, dtype = getattr(logits, "shape", None), getattr(logits, "dtype", None)
    if shape is None or dtype is None:
        raise ConfigError(f"{step} gives a {type(logits).__name__}: expected logits {expected}")
    if shape != expected or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"{step} gives {dtype} {shape}: expected logits, floats {expected}")


def _check_features(features: Any, step: str) -> None:
    """Raise ConfigError unless the features have two axes."""
    if len(features.shape) != 2:
        raise ConfigError(f"{step} gives features {features.shape}: expected [{_BATCH_SIZE}, F]")


def _check_state(before: Any, after: Any, step: str) -> None:
    """Raise ConfigError unless each leaf of the state keeps its shape and dtype after a batch."""
    old, new = (
        {jax.tree_util.keystr(path): leaf for path, leaf in _flatten_with_paths(tree)}
        for tree in (before, after)
    )
    for location in [*old, *(location for location in new if location not in old)]:
        leaf, other = (_describe_leaf(leaves.get(location)) for leaves in (old, new))
        if leaf != other:
            raise ConfigError(
                f"{step} turns state{location}, {leaf}, into {other}: expected no change"
            )


def _flatten_with_paths(tree: Any) -> list[tuple[Any, Any]]:
    """Return the (path, leaf) pairs of a tree."""
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _describe_leaf(leaf: Any) -> str:
    """Return dtype and shape of a leaf as text; "nothing" for None."""
    return "nothing" if leaf is None else f"{leaf.dtype} {leaf.shape}"
