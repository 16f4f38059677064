"""How much arithmetic training takes: the multiplications and additions of its matrix products.

Multiply-adds of the products in traced programs.
"""

import math
from typing import Any

import jax

from fedjax_het.nn.conv.primitive import CONV_INPUT_GRADIENT, CONV_KERNEL_GRADIENT, CONV_OUTPUT
from fedjax_het.nn.model import Model


def count_training_flops(model: Model) -> int:
    """Floating-point operations that one training sample takes: 2 per multiply-add.

    Counted are the products of convolutions (their zero padding included, as is usual) and fully
    connected layers: once in the forward pass, and twice in the backward pass, for the gradients of
    kernel and input, which the first layer has no need of. Everything else (norms, pooling, the
    optimiser) is not. What a program really executes may be more.
    """
    forward = _list_forward_multiply_adds(model)
    return 2 * (3 * sum(forward) - forward[0])


def _list_forward_multiply_adds(model: Model) -> list[int]:
    """Multiply-adds of each layer for one sample, in order."""
    variables = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *model.input_shape), "float32")
    trace = jax.make_jaxpr(lambda variables, x: model.apply(variables, x, train=False)[0])
    return list(_iter_multiply_adds(trace(variables, image).jaxpr))


def _iter_multiply_adds(jaxpr):
    for equation in jaxpr.eqns:
        count = count_multiply_adds(equation)
        if count is not None:
            yield count
            continue
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _iter_multiply_adds(inner)


def count_multiply_adds(equation: Any) -> int | None:
    """Of an equation of a jaxpr; None where it is no product.

    Products are those of matrices and of convolutions, the package's own among them; zero padding
    is counted, as is usual.
    """
    if len(equation.invars) != 2 or not equation.outvars:
        return None
    (left, right), out = (var.aval for var in equation.invars), equation.outvars[0].aval
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return out.size * math.prod(left.shape[axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        output_axis = equation.params["dimension_numbers"].rhs_spec[0]
        return out.size * right.size // right.shape[output_axis]
    # The three of a convolution take as many: those of its outputs [L, B, H, W, O], each of a
    # window of the kernel [L, h, w, I, O].
    if equation.primitive is CONV_OUTPUT:
        return out.size * math.prod(right.shape[1:4])
    if equation.primitive is CONV_INPUT_GRADIENT:
        return left.size * math.prod(right.shape[1:4])
    if equation.primitive is CONV_KERNEL_GRADIENT:
        return right.size * math.prod(out.shape[1:4])
    return None
