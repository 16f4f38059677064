"""Precision and convolution implementation of any network, set around its functions.

`precision` sets matrix products and convolutions, and their derivatives, on every backend:

* "float32": products of float32 numbers.
* "tf32": products of float32 numbers of which at least 10 bits of the fraction count. A CPU
  multiplies in float32 in both cases.
* "bfloat16": the network's parameters are converted on input, and its activations are bfloat16.
  Stored parameters, their gradients, sums of products, statistics of normalization, features,
  logits and the loss stay float32.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from fedjax_het.nn.conv import CONV_OUTPUT, set_matmul_precision
from fedjax_het.nn.conv_products import AUTO
from fedjax_het.nn.flops import iter_equations, trace_evaluation
from fedjax_het.nn.model import Model

Tree = Any
Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
FLOAT32, TF32, BFLOAT16 = PRECISIONS
# jax's names. "tensorfloat32" is native on a GPU and three bfloat16 products on a TPU.
_MATMUL_PRECISIONS = {FLOAT32: "float32", TF32: "tensorfloat32"}


def configure_compute(
    model: Model, *, conv_impl: str = AUTO, precision: str | None = None
) -> Model:
    """Bind how a network's numbers, and their derivatives, are computed.

    Args:
      model: any network.
      conv_impl: implementation of the convolutions that leave it open. It has no effect on a
        network without `takes_conv_impl`.
      precision: one of `PRECISIONS`; None for the backend's own.

    Returns:
      The network with these choices; `model` itself if both are left open.
    """
    if conv_impl == AUTO and precision is None:
        return model
    takes_impl = model.takes_conv_impl and conv_impl != AUTO
    call_arguments = {"conv_impl": conv_impl} if takes_impl else {}

    def wrap(function: Callable, cast_function: Callable) -> Callable:
        target = cast_function(function) if precision == BFLOAT16 else function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with set_matmul_precision(_MATMUL_PRECISIONS.get(precision or "")):
                return target(*args, **kwargs)

        return call

    def wrap_network(function: Callable) -> Callable:
        return wrap(functools.partial(function, **call_arguments), _wrap_network_bfloat16)

    head, embed = model.head, model.embed
    return model._replace(
        apply=wrap_network(model.apply),
        embed=embed and wrap_network(embed),
        head=head and head._replace(apply=wrap(head.apply, _wrap_head_bfloat16)),
        # Products that the network does not compute itself would have another precision.
        input_layer=model.input_layer if precision is None else None,
    )


def describe_precision(precision: str | None, matmul_precision: str | None, platform: str) -> str:
    """Describe the precision in which a run's networks were computed.

    Args:
      precision: one of `PRECISIONS`, or None.
      matmul_precision: the process's `jax_default_matmul_precision`.
      platform: platform of the devices: "cpu", "gpu", "tpu" or another.

    Returns:
      The precision as text for results and reports.
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
    """Return whether a network has convolutions with `impl="auto"`.

    Cost: one trace.

    Args:
      model: the network.

    Returns:
      True if one of its convolutions has `impl="auto"`.
    """
    return any(
        equation.primitive is CONV_OUTPUT and equation.params["of"].impl == AUTO
        for equation in iter_equations(trace_evaluation(model))
    )


def _wrap_network_bfloat16(function: Callable) -> Callable:
    """Wrap `apply` or `embed` of float32 parameters so that it computes in bfloat16."""

    def call(variables: Tree, x: jax.Array, **kwargs: Any) -> tuple:
        bfloat16_variables = {**variables, "params": _to_bfloat16(variables["params"])}
        *outputs, state = function(bfloat16_variables, _to_bfloat16(x), **kwargs)
        new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, variables["state"])
        return *map(_to_float32, outputs), new_state

    return call


def _wrap_head_bfloat16(function: Callable) -> Callable:
    """Wrap a head's `apply` of float32 parameters so that it computes in bfloat16."""
    return lambda parameters, features: _to_float32(
        function(_to_bfloat16(parameters), _to_bfloat16(features))
    )


def _to_bfloat16(tree: Tree) -> Tree:
    """Convert the float32 leaves of a tree to bfloat16."""

    def convert_leaf(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf

    return jax.tree.map(convert_leaf, tree)


def _to_float32(array: jax.Array) -> jax.Array:
    """Convert a bfloat16 array to float32."""
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array
