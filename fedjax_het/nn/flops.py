"""How much arithmetic training takes: the multiplications and additions of its matrix products."""

import math

import jax

from fedjax_het.nn.conv import OUTPUT
from fedjax_het.nn.models import Model


def training_flops(model: Model) -> int:
    """Floating-point operations that one training sample takes: 2 per multiply-add.

    Counted are the products of convolutions (their zero padding included, as is usual) and fully
    connected layers: once in the forward pass, and twice in the backward pass, for the gradients of
    kernel and input, which the first layer has no need of. Everything else (norms, pooling, the
    optimiser) is not. What a program really executes may be more.
    """
    forward = _products_of_forward(model)
    return 2 * (3 * sum(forward) - forward[0])


def _products_of_forward(model: Model) -> list[int]:
    """Multiply-adds of each layer for one sample, in order."""
    variables = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *model.input_shape), "float32")
    traced = jax.make_jaxpr(lambda variables, x: model.apply(variables, x, train=False)[0])
    return list(_products(traced(variables, image).jaxpr))


def _products(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            yield equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        elif equation.primitive is OUTPUT:
            height, width, channels = equation.invars[1].aval.shape[1:4]
            yield equation.outvars[0].aval.size * height * width * channels
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            outputs = equation.params["dimension_numbers"].rhs_spec[0]
            yield equation.outvars[0].aval.size * kernel.size // kernel.shape[outputs]
        else:
            for parameter in equation.params.values():
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    yield from _products(inner)
