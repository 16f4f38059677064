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

from fedjax_het.nn.conv.dispatch import AUTO
from fedjax_het.nn.conv.primitive import CONV_OUTPUT
from fedjax_het.nn.model import Model

Tree = Any
Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
FLOAT32, TF32, BFLOAT16 = PRECISIONS
# As jax has them: on a GPU "tensorfloat32" are its own products, on a TPU three of bfloat16.
_MATMUL_PRECISIONS = {FLOAT32: "float32", TF32: "tensorfloat32"}


def configure_compute(
    model: Model, *, conv_impl: str = AUTO, precision: str | None = None
) -> Model:
    """Bind how a network's numbers, and their derivatives, are computed.

    Args:
      model: any network.
      conv_impl: implementation of the convolutions that leave it open. It has no effect on a network
        without `takes_conv_impl`.
      precision: one of `PRECISIONS`; None for the backend's own.

    Returns:
      The network with these choices; `model` itself if both are left open.
    """
    if conv_impl == AUTO and precision is None:
        return model
    conv_arguments = (
        {} if conv_impl == AUTO or not model.takes_conv_impl else {"conv_impl": conv_impl}
    )

    def wrap(function: Callable, cast_function: Callable) -> Callable:
        target = cast_function(function) if precision == BFLOAT16 else function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _set_matmul_precision(precision):
                return target(*args, **kwargs)

        return call

    head, embed = model.head, model.embed
    return model._replace(
        apply=wrap(functools.partial(model.apply, **conv_arguments), _wrap_network_bfloat16),
        embed=None
        if embed is None
        else wrap(functools.partial(embed, **conv_arguments), _wrap_network_bfloat16),
        head=None if head is None else head._replace(apply=wrap(head.apply, _wrap_head_bfloat16)),
    )


def describe_precision(precision: str | None, matmul_precision: str | None, platform: str) -> str:
    """In what a run's networks were computed, in words.

    asked: the process's `jax_default_matmul_precision`. platform: of the devices.
    """
    if platform == "cpu":
        return BFLOAT16 if precision == BFLOAT16 else FLOAT32
    if precision is not None:
        return precision
    if matmul_precision is not None:
        return FLOAT32 if matmul_precision in ("float32", "highest") else matmul_precision
    product_precision = "bfloat16" if platform == "tpu" else "tf32 where the device has them"
    return f"float32, products of {product_precision}"


def has_auto_convolutions(model: Model) -> bool:
    """Whether a network has convolutions that are computed as is fastest. Cost: a trace."""
    variables = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *model.input_shape), "float32")
    trace = jax.make_jaxpr(lambda variables, x: model.apply(variables, x, train=False)[0])
    return _has_auto_convolution(trace(variables, image).jaxpr)


def _has_auto_convolution(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        if equation.primitive is CONV_OUTPUT and equation.params["of"].impl == AUTO:
            return True
        inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
        if any(hasattr(program, "eqns") and _has_auto_convolution(program) for program in inner):
            return True
    return False


def _set_matmul_precision(precision: str | None) -> contextlib.AbstractContextManager[Any]:
    if precision not in _MATMUL_PRECISIONS:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(_MATMUL_PRECISIONS[precision])


def _wrap_network_bfloat16(function: Callable) -> Callable:
    """`apply` or `embed` of float32 parameters, computed in bfloat16."""

    def call(variables: Tree, x: jax.Array, **kwargs: Any) -> tuple:
        bfloat16_variables = {**variables, "params": _to_bfloat16(variables["params"])}
        *outputs, state = function(bfloat16_variables, _to_bfloat16(x), **kwargs)
        return *map(_to_float32, outputs), jax.tree.map(_cast_like, state, variables["state"])

    return call


def _wrap_head_bfloat16(function: Callable) -> Callable:
    return lambda parameters, features: _to_float32(
        function(_to_bfloat16(parameters), _to_bfloat16(features))
    )


def _to_bfloat16(tree: Tree) -> Tree:
    def convert_leaf(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf

    return jax.tree.map(convert_leaf, tree)


def _to_float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _cast_like(new: jax.Array, old: jax.Array) -> jax.Array:
    return new.astype(old.dtype)
