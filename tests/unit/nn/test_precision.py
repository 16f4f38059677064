"""A network by another convolution or precision: the same but for rounding, and only where said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.markers import slow_case

from fedjax_het.nn import make_model
from fedjax_het.nn.precision import (
    BFLOAT16,
    PRECISIONS,
    configure_compute,
    describe_precision,
    has_auto_convolutions,
)

NETWORKS = {
    "mlp": {"hidden": (16,)},
    "convnet": {"width": 8, "depth": 1},
    "resnet18": {"width": 4, "stem": "cifar"},
}
SHAPE = (8, 8, 2)


def network(name="convnet", **options):
    return make_model(name, SHAPE, 3, **NETWORKS[name], **options)


def products_of(model):
    """The lines of the products in a gradient's program, as it is traced."""

    def gradient(variables, x):
        def loss(params):
            logits, state = model.apply({**variables, "params": params}, x, train=True)
            return jnp.square(logits).sum(), state

        return jax.grad(loss, has_aux=True)(variables["params"])

    variables = jax.eval_shape(model.init, jax.random.key(0))
    program = jax.jit(gradient).trace(variables, jax.ShapeDtypeStruct((4, *SHAPE), jnp.float32))
    equations = [e for e in program.jaxpr.eqns if e.primitive.name.startswith(("conv2d", "dot_"))]
    return equations, jax.eval_shape(gradient, variables, jnp.zeros((4, *SHAPE)))


@pytest.mark.parametrize("name", [slow_case(n) if n == "resnet18" else n for n in NETWORKS])
def test_bfloat16_products(name):
    """Forward and backward; parameters, gradients, state and logits are float32."""
    model = configure_compute(network(name), precision=BFLOAT16)
    equations, results = products_of(model)
    assert equations
    dtypes = {v.aval.dtype for e in equations for v in (*e.invars, *e.outvars)}
    assert dtypes == {np.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(results)} == {np.dtype(np.float32)}
    variables, x = model.init(jax.random.key(0)), jnp.ones((4, *SHAPE))
    features, logits, _ = model.embed(variables, x, train=False)
    head = model.head.apply(model.head.get_parameters(variables), features)
    assert {features.dtype, logits.dtype, head.dtype} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(head, logits)


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_bfloat16_error(name):
    model, key = network(name), jax.random.key(0)
    variables, x = model.init(key), jax.random.normal(key, (4, *SHAPE))
    exact, _ = model.apply(variables, x, train=True)
    short, _ = configure_compute(model, precision=BFLOAT16).apply(variables, x, train=True)
    gap = np.linalg.norm(short - exact) / np.linalg.norm(exact)
    assert 0 < gap < 0.05


def test_norm_statistics_in_float32():
    """Of 2^12 pixels around 8: in 8 bits their mean would stay at a power of two."""
    model = make_model("convnet", (64, 64, 1), 3, width=4, depth=1, norm="batch")
    low, key = configure_compute(model, precision=BFLOAT16), jax.random.key(0)
    variables, x = model.init(key), 8 + jax.random.normal(key, (2, 64, 64, 1))
    means = [m.apply(variables, x, train=True)[1] for m in (model, low)]
    for one, other in zip(*map(jax.tree.leaves, means), strict=True):
        np.testing.assert_allclose(one, other, rtol=4e-3, atol=4e-3)


def test_matmul_precision():
    for precision, name in (("float32", "HIGHEST"), ("tf32", "HIGH")):
        with jax.default_matmul_precision(None):
            equations, _ = products_of(configure_compute(network(), precision=precision))
        assert len(equations) >= 4
        for equation in equations:
            of = equation.params.get("of")
            actual = of.precision if of else str(equation.params["precision"][0])
            assert actual in (name, {"HIGHEST": "float32", "HIGH": "tensorfloat32"}[name])


def test_configure_compute_without_options():
    model = network()
    assert configure_compute(model) is model
    assert configure_compute(model, conv_impl="im2col") != model


def test_has_auto_convolutions():
    assert has_auto_convolutions(network())
    assert not has_auto_convolutions(network(conv_impl="native"))
    assert not has_auto_convolutions(configure_compute(network(), conv_impl="im2col"))
    assert not has_auto_convolutions(network("mlp"))


def test_describe_precision():
    for precision in PRECISIONS:
        assert describe_precision(precision, None, "gpu") == precision
    assert describe_precision("tf32", None, "cpu") == "float32"
    assert describe_precision(BFLOAT16, None, "cpu") == BFLOAT16
    for matmul_precision in (None, "bfloat16"):
        assert describe_precision(None, matmul_precision, "cpu") == "float32"
    assert describe_precision(None, "highest", "gpu") == "float32"
    assert "tf32" in describe_precision(None, None, "gpu")
    assert "bfloat16" in describe_precision(None, None, "tpu")
