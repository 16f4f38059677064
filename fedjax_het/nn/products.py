"""Multiply-adds of the products in traced programs."""

import math
from typing import Any

from fedjax_het.nn.conv import CONV_INPUT_GRADIENT, CONV_KERNEL_GRADIENT, CONV_OUTPUT


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
