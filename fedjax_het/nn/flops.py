"""Arithmetic cost of training: multiply-adds of the matrix products in traced programs."""

import math
from collections.abc import Iterator
from typing import Any

import jax

from fedjax_het.nn.conv import CONV_INPUT_GRADIENT, CONV_KERNEL_GRADIENT, CONV_OUTPUT
from fedjax_het.nn.model import Model
from fedjax_het.utils.arrays import make_key


def count_training_flops(model: Model) -> int:
    """Count the floating-point operations of training on one sample: 2 per multiply-add.

    The products of convolutions and fully connected layers count once in the forward pass. They
    count twice in the backward pass, for the gradients of kernel and input. The first layer needs
    no input gradient. Zero padding counts, as is usual. Everything else (normalization, pooling,
    the optimizer) does not. The compiled program may execute more operations.

    Args:
      model: the network.

    Returns:
      Floating-point operations per sample; 0 for a network without such products.

    Example:
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.nn import count_training_flops
      >>> count_training_flops(make_model("mlp", (2, 2, 1), 3, hidden=[5]))
      170
    """
    forward = list(iter_multiply_adds(trace_evaluation(model)))
    return 2 * (3 * sum(forward) - sum(forward[:1]))


def trace_evaluation(model: Model) -> Any:
    """Trace the logits of one example.

    Args:
      model: the network.

    Returns:
      The program, a `jax.core.Jaxpr`.
    """
    variables = jax.eval_shape(model.init, make_key(0))
    trace = jax.make_jaxpr(lambda variables, x: model.apply(variables, x, train=False)[0])
    return trace(variables, model.make_inputs(1)).jaxpr


def iter_inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation.

    Args:
      equation: a `jax.core.JaxprEqn`.

    Yields:
      The jaxprs, without the constants of closed ones.
    """

    def is_jaxpr(value):
        return hasattr(getattr(value, "jaxpr", value), "eqns")

    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(value):
            yield getattr(value, "jaxpr", value)


def iter_equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of the jaxprs inside it, in order.

    Args:
      jaxpr: a `jax.core.Jaxpr`.

    Yields:
      The equations, each `jax.core.JaxprEqn` before those inside it.
    """
    for equation in jaxpr.eqns:
        yield equation
        for inner in iter_inner_jaxprs(equation):
            yield from iter_equations(inner)


def iter_multiply_adds(jaxpr: Any) -> Iterator[int]:
    """Yield the multiply-adds of each product in a jaxpr and in the jaxprs inside it, in order.

    Args:
      jaxpr: a `jax.core.Jaxpr`.

    Yields:
      Number of multiply-adds of a product, with all iterations of `jax.lax.scan`. Other loops count
      as one iteration.
    """
    for equation in jaxpr.eqns:
        if (count := count_multiply_adds(equation)) is not None:
            yield count
        iterations = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in iter_inner_jaxprs(equation):
            yield from (iterations * count for count in iter_multiply_adds(inner))


def count_multiply_adds(equation: Any) -> int | None:
    """Count the multiply-adds of one equation of a jaxpr.

    Products of matrices and of convolutions count, also the package's own convolution. Zero padding
    counts, as is usual.

    Args:
      equation: a `jax.core.JaxprEqn`.

    Returns:
      Number of multiply-adds; None if the equation is not a product.
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
    # All three products of a convolution have the same multiply-adds. There is one for each number
    # of the outputs [L, B, H', W', O] and each number kh kw I of the kernel's window.
    if equation.primitive is CONV_OUTPUT:
        return out.size * math.prod(right.shape[1:4])
    if equation.primitive is CONV_INPUT_GRADIENT:
        return left.size * math.prod(right.shape[1:4])
    if equation.primitive is CONV_KERNEL_GRADIENT:
        return right.size * math.prod(out.shape[1:4])
    return None
