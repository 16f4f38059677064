"""How much arithmetic training takes: the multiplications and additions of its matrix products."""

import jax

from fedjax_het.nn.models import Model
from fedjax_het.nn.products import multiply_adds


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
        found = multiply_adds(equation)
        if found is not None:
            yield found
            continue
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _products(inner)
