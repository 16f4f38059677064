"""A pair of functions, `init` and `apply`, as a `Model`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.common.signatures import parameters_of
from fedjax_het.nn.collections import (
    FLAGS,
    as_flag,
    flag_of,
    other_collections,
    to_collections,
    to_state,
    to_variables,
)
from fedjax_het.nn.models import Model

_KEYS = ("key", "rng")  # what `apply` may call the key


def pair_model(
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

    def drawn(key: jax.Array) -> tuple[Any, bool]:
        variables = init(*_first_arguments(init, key, image), **_flag(init, False))
        named = isinstance(variables, Mapping) and "params" in variables
        return (dict(variables) if named else {"params": variables}), named

    found: dict[str, Any] = {}

    def survey(key: jax.Array) -> None:
        by_collection, found["named"] = drawn(key)
        found["collections"] = other_collections(by_collection)

    jax.eval_shape(survey, jax.random.key(0))
    named, collections = found["named"], found["collections"]

    def model_init(key: jax.Array):
        return to_variables(drawn(key)[0], collections)

    def model_apply(variables, x, *, train, key=None):
        by_collection = to_collections(variables, collections)
        how = {name: key for name in _KEYS if name in parameters_of(apply)}
        given = by_collection if named else by_collection["params"]
        out = apply(given, x, **_flag(apply, train), **how)
        if not (isinstance(out, tuple) and len(out) == 2):
            return out, variables["state"]
        logits, new = out
        if not (train and collections):
            return logits, variables["state"]
        return logits, to_state({**by_collection, **new}, collections)

    return Model("pair", input_shape, num_classes, model_init, model_apply)


def _first_arguments(init: Callable, key: jax.Array, image: jax.Array) -> tuple[Any, ...]:
    positional = [
        parameter
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in FLAGS
    ]
    return (key, image)[: max(1, len(positional))]


def _flag(function: Callable, train: bool) -> dict[str, bool]:
    return as_flag(flag_of(parameters_of(function)), train)
