"""A pair of functions, `init` and `apply`, as a `Model`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.common.signatures import get_keyword_parameters
from fedjax_het.nn.collections import (
    TRAINING_FLAGS,
    find_training_flag,
    list_state_collections,
    make_flag_arguments,
    to_collections,
    to_state,
    to_variables,
)
from fedjax_het.nn.models import Model

_KEY_NAMES = ("key", "rng")  # what `apply` may call the key


def make_pair_model(
    init: Callable, apply: Callable, input_shape: tuple[int, int, int], num_classes: int
) -> Model:
    """A `Model` of `init(key)`, `init(key, images)` or `init(key, images, train)`, and of
    `apply(variables, images)` or `apply(variables, images, train)`.

    Variables with "params" are by collections, as flax's; any others are all parameters. `apply`
    returns logits, or (logits, new_state), where new_state holds the collections besides the
    parameters. The flag may be called train, training or deterministic; a parameter `key` or `rng`
    is given the key. There is no head, no `embed` and no normalisation layer.

    Cost: one abstract evaluation of `init`, whose errors are raised as they are.
    """
    image = jnp.zeros((1, *input_shape))

    def draw_variables(key: jax.Array) -> tuple[Any, bool]:
        variables = init(
            *_list_init_arguments(init, key, image), **_make_function_flag(init, False)
        )
        has_collections = isinstance(variables, Mapping) and "params" in variables
        return (dict(variables) if has_collections else {"params": variables}), has_collections

    structure: dict[str, Any] = {}

    def record_structure(key: jax.Array) -> None:
        by_collection, structure["named"] = draw_variables(key)
        structure["collections"] = list_state_collections(by_collection)

    jax.eval_shape(record_structure, jax.random.key(0))
    has_collections, collections = structure["named"], structure["collections"]

    def model_init(key: jax.Array):
        return to_variables(draw_variables(key)[0], collections)

    def model_apply(variables, x, *, train, key=None):
        by_collection = to_collections(variables, collections)
        key_arguments = {name: key for name in _KEY_NAMES if name in get_keyword_parameters(apply)}
        apply_variables = by_collection if has_collections else by_collection["params"]
        out = apply(apply_variables, x, **_make_function_flag(apply, train), **key_arguments)
        if not (isinstance(out, tuple) and len(out) == 2):
            return out, variables["state"]
        logits, updates = out
        if not (train and collections):
            return logits, variables["state"]
        return logits, to_state({**by_collection, **updates}, collections)

    return Model("pair", input_shape, num_classes, model_init, model_apply)


def _list_init_arguments(init: Callable, key: jax.Array, image: jax.Array) -> tuple[Any, ...]:
    positional = [
        parameter
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in TRAINING_FLAGS
    ]
    return (key, image)[: max(1, len(positional))]


def _make_function_flag(function: Callable, train: bool) -> dict[str, bool]:
    return make_flag_arguments(find_training_flag(get_keyword_parameters(function)), train)
