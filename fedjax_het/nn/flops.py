"""How much arithmetic training takes: the multiplications and additions of its matrix products."""

import jax

from fedjax_het.nn.models import Model
from fedjax_het.nn.products import count_multiply_adds


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
