"""How a network's numbers are computed, whatever the network: said around its functions, in one
place.

`precision` is of products of matrices and of convolutions: in "float32" they are products of true
float32, in "tf32" of float32 numbers of which at least 10 bits of the fraction count; both also of
their derivatives, and by whatever a backend has for it (a CPU multiplies in float32 either way).
With "bfloat16" a network's numbers are bfloat16: its parameters, as they come in, and its
activations. Parameters that are kept and stepped, their gradients, sums of products, statistics of
normalisation, features, logits and the loss are float32.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from fedjax_het.nn.conv import OUTPUT
from fedjax_het.nn.conv_products import AUTO, automatic
from fedjax_het.nn.models import Model

Tree = Any
Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
FLOAT32, TF32, BFLOAT16 = PRECISIONS
# As jax has them: on a GPU "tensorfloat32" are its own products, on a TPU three of bfloat16.
_PRODUCTS = {FLOAT32: "float32", TF32: "tensorfloat32"}


def computed(model: Model, *, conv_impl: str = AUTO, precision: str | None = None) -> Model:
    """The same network, of which convolutions that leave it open take `conv_impl`, and all products
    `precision` (None: the backend's own); their derivatives too. Programs are the same where
    neither says anything."""
    if conv_impl == AUTO and precision is None:
        return model

    def around(function: Callable, in_short: Callable) -> Callable:
        called = in_short(function) if precision == BFLOAT16 else function

        @functools.wraps(function)
        def call(*args: Any, **how: Any) -> Any:
            with automatic(conv_impl), _products(precision):
                return called(*args, **how)

        return call

    head, embed = model.head, model.embed
    return model._replace(
        apply=around(model.apply, _network_in_short),
        embed=None if embed is None else around(embed, _network_in_short),
        head=None if head is None else head._replace(apply=around(head.apply, _head_in_short)),
    )


def used_precision(precision: str | None, asked: str | None, platform: str) -> str:
    """In what a run's networks were computed, in words.

    asked: the process's `jax_default_matmul_precision`. platform: of the devices.
    """
    if platform == "cpu":
        return BFLOAT16 if precision == BFLOAT16 else FLOAT32
    if precision is not None:
        return precision
    if asked is not None:
        return FLOAT32 if asked in ("float32", "highest") else asked
    short = "bfloat16" if platform == "tpu" else "tf32 where the device has them"
    return f"float32, products of {short}"


def leaves_convolutions_open(model: Model) -> bool:
    """Whether a network has convolutions that are computed as is fastest. Cost: a trace."""
    variables = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *model.input_shape), "float32")
    traced = jax.make_jaxpr(lambda variables, x: model.apply(variables, x, train=False)[0])
    return _has_open(traced(variables, image).jaxpr)


def _has_open(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        if equation.primitive is OUTPUT and equation.params["of"].impl == AUTO:
            return True
        inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
        if any(hasattr(program, "eqns") and _has_open(program) for program in inner):
            return True
    return False


def _products(precision: str | None) -> contextlib.AbstractContextManager[Any]:
    if precision not in _PRODUCTS:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(_PRODUCTS[precision])


def _network_in_short(function: Callable) -> Callable:
    """`apply` or `embed` of float32 parameters, computed in bfloat16."""

    def call(variables: Tree, x: jax.Array, **how: Any) -> tuple:
        given = {**variables, "params": _short(variables["params"])}
        *found, state = function(given, _short(x), **how)
        return *map(_long, found), jax.tree.map(_typed_as, state, variables["state"])

    return call


def _head_in_short(function: Callable) -> Callable:
    return lambda parameters, features: _long(function(_short(parameters), _short(features)))


def _short(tree: Tree) -> Tree:
    def short(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf

    return jax.tree.map(short, tree)


def _long(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _typed_as(new: jax.Array, old: jax.Array) -> jax.Array:
    return new.astype(old.dtype)
