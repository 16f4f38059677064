"""Convolution and its derivatives, by either way of computing them."""

import re
from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.markers import slow_case
from support.x64 import enable_x64

from fedjax_het.nn import conv2d, conv_products, make_model, to_model
from fedjax_het.nn.conv import apply_per_lane
from fedjax_het.nn.conv_products import CONV_IMPLS, Convolution
from fedjax_het.nn.precision import configure_compute

# Batch, height, width, channels, features, window, padding, stride: of few channels and of as many
# as make a CPU take its library; more padding than window; sides of both parities, so that strides
# leave edges unread or do not; batches that are no multiple of four.
SHAPES = [
    (2, 9, 8, 3, 4, 3, 1, 1),
    (2, 9, 8, 3, 4, 5, 2, 1),
    (3, 7, 8, 16, 32, 3, 1, 1),
    (5, 8, 7, 6, 32, 5, 0, 1),
    (1, 6, 6, 1, 32, 3, 3, 1),
    (9, 5, 5, 12, 33, 2, 1, 1),
    (2, 5, 4, 8, 40, 1, 0, 1),
    (2, 9, 8, 8, 32, 3, 1, 2),
    (2, 8, 9, 3, 4, 7, 3, 2),
    (2, 7, 8, 3, 4, 1, 0, 2),
    (2, 7, 8, 3, 4, 4, 0, 3),
    (2, 7, 8, 3, 4, 2, 1, 3),
]


def drawn(shape, dtype=np.float32):
    """An input, a kernel and a cotangent of the output."""
    batch, height, width, channels, features, window, padding, stride = shape
    sides = [(side + 2 * padding - window) // stride + 1 for side in (height, width)]
    shapes = (
        (batch, height, width, channels),
        (window, window, channels, features),
        (batch, *sides, features),
    )
    random = np.random.default_rng(sum(shape))
    return [random.normal(size=shape).astype(dtype) for shape in shapes]


def meetings(shape):
    """Which pixel of the input the kernel's (row, column) meets, for each pixel of the output."""
    _, height, width, _, _, window, padding, stride = shape
    rows, columns = drawn(shape)[2].shape[1:3]
    for i, j, row, column in np.ndindex(rows, columns, window, window):
        y, x = i * stride + row - padding, j * stride + column - padding
        if 0 <= y < height and 0 <= x < width:
            yield (i, j), (row, column), (y, x)


def products_in_float64(shape):
    """The output, and the gradients of <output, cotangent> by input and by kernel."""
    x, kernel, cotangent = (np.asarray(array, np.float64) for array in drawn(shape))
    output, to_x, to_kernel = np.zeros_like(cotangent), np.zeros_like(x), np.zeros_like(kernel)
    for (i, j), (row, column), (y, z) in meetings(shape):
        output[:, i, j] += x[:, y, z] @ kernel[row, column]
        to_x[:, y, z] += cotangent[:, i, j] @ kernel[row, column].T
        to_kernel[row, column] += x[:, y, z].T @ cotangent[:, i, j]
    return output, to_x, to_kernel


def convolution(shape, impl="auto"):
    *_, padding, stride = shape
    return lambda x, kernel: conv2d(x, kernel, padding, impl, stride)


def assert_close(actual, expected, tolerance=1e-5):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize("impl", CONV_IMPLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_conv2d_and_gradients_match_definition(shape, impl):
    @jax.jit
    def compute_products(x, kernel, cotangent):
        output, pull = jax.vjp(convolution(shape, impl), x, kernel)
        return [output, *pull(cotangent)]

    assert_close(compute_products(*drawn(shape)), products_in_float64(shape))


@pytest.mark.parametrize("shape", SHAPES[2:9:2])
def test_conv2d_is_bilinear(shape):
    """d(x * k) = dx * k + x * dk, and the same of both gradients: each is one of the three."""
    f = convolution(shape)
    x, kernel, cotangent = drawn(shape)
    dx, dkernel, dcotangent = (array[::-1] for array in drawn(shape))
    actual = jax.jvp(f, (x, kernel), (dx, dkernel))[1]
    assert_close([actual], [f(dx, kernel) + f(x, dkernel)])

    def gradients(x, kernel, cotangent):
        return jax.vjp(f, x, kernel)[1](cotangent)

    pushed = jax.jvp(gradients, (x, kernel, cotangent), (dx, dkernel, dcotangent))[1]
    expected = [
        gradients(x, dkernel, cotangent)[0] + gradients(x, kernel, dcotangent)[0],
        gradients(dx, kernel, cotangent)[1] + gradients(x, kernel, dcotangent)[1],
    ]
    assert_close(pushed, expected)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[4], SHAPES[7]])
@pytest.mark.parametrize("clients", [0, 3])
def test_second_derivatives(shape, clients):
    """Reverse over reverse, with one kernel and with one for each client; forward over reverse."""
    x, kernel, _ = drawn(shape)
    if clients:
        x, kernel = (np.stack([a * (c + 1) / 4 for c in range(clients)]) for a in (x, kernel))

    def derivatives(impl):
        def loss(x, kernel):
            return jnp.sin(convolution(shape, impl)(x, kernel)).sum()

        def gradient(x, kernel):
            return jax.grad(loss, argnums=(0, 1))(x, kernel)

        def squared_gradient(x, kernel):
            return sum((g**2).sum() for g in gradient(x, kernel))

        def both(x, kernel):
            along = gradient(x, kernel)
            reverse = jax.grad(squared_gradient, argnums=(0, 1))(x, kernel)
            forward = jax.jvp(gradient, (x, kernel), along)[1]
            return reverse, [2 * part for part in forward]

        return jax.jit(jax.vmap(both) if clients else both)(x, kernel)

    (reverse, forward), (expected, _) = derivatives("auto"), derivatives("im2col")
    assert_close(reverse, expected, 2e-5)
    assert_close(forward, expected, 2e-5)


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[7]])
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (2, 3)])
def test_conv2d_under_vmap(shape, axes):
    """To the bit where each has a kernel of its own, as lanes have; gradients too."""
    x, kernel, _ = drawn(shape)
    number, f = 3, convolution(shape)

    def several(array, axis):
        if axis is None:
            return array
        return np.stack([array * (n + 1) for n in range(number)], axis=axis)

    def one(array, axis, n):
        return array if axis is None else np.take(array, n, axis=axis)

    def outcome(x, kernel):
        gradient = jax.grad(lambda *both: (f(*both) ** 2).sum(), argnums=(0, 1))
        return f(x, kernel), gradient(x, kernel)

    operands = [several(array, axis) for array, axis in zip((x, kernel), axes, strict=True)]
    mapped = jax.jit(jax.vmap(outcome, in_axes=axes))(*operands)
    for n in range(number):
        alone = jax.jit(outcome)(*(one(a, axis, n) for a, axis in zip(operands, axes, strict=True)))
        actual = jax.tree.map(lambda leaf, n=n: leaf[n], mapped)
        if axes[1] is None:
            assert_close(*map(jax.tree.leaves, (actual, alone)))
        else:
            jax.tree.map(np.testing.assert_array_equal, actual, alone)


def test_conv2d_under_two_vmaps():
    shape = SHAPES[2]
    x, kernel, _ = drawn(shape)
    kernels = np.stack([[kernel, 2 * kernel, 3 * kernel], [4 * kernel, 5 * kernel, 6 * kernel]])
    actual = jax.vmap(jax.vmap(convolution(shape), (None, 0)), (None, 0))(x, kernels)
    f = convolution(shape)
    alone = jax.lax.map(lambda kernel: f(x, kernel), kernels.reshape(6, *kernel.shape))
    np.testing.assert_array_equal(actual.reshape(alone.shape), alone)


def test_float64_and_bfloat16():
    shape = SHAPES[2]
    with enable_x64(True):
        x, kernel, cotangent = drawn(shape, np.float64)
        output, pull = jax.vjp(convolution(shape), x, kernel)
        assert output.dtype == np.float64
        exact = [np.asarray(part) for part in (output, *pull(cotangent))]
        # Of float32 images by a kernel of float64: what they have in common.
        assert convolution(shape)(x.astype(np.float32), kernel).dtype == np.float64
    assert_close(exact, products_in_float64(shape), 1e-6)
    half = convolution(shape)(*(array.astype(jnp.bfloat16) for array in drawn(shape)[:2]))
    assert half.dtype == jnp.bfloat16
    assert_close([np.asarray(half, np.float64)], products_in_float64(shape)[:1], 2e-2)


@pytest.mark.parametrize(
    ("shape", "takes"), [(SHAPES[2], "convolution"), (SHAPES[0], "dot_general")]
)
def test_auto_impl_on_cpu(shape, takes):
    """Its library for many channels, matrices for few; "native" and "im2col" do as they say."""
    x, kernel, _ = drawn(shape)

    def text(impl):
        return jax.jit(convolution(shape, impl)).lower(x, kernel).as_text()

    if jax.default_backend() == "cpu":
        assert f"stablehlo.{takes}" in text("auto")
    assert "stablehlo.convolution" in text("native")
    assert "stablehlo.convolution" not in text("im2col")


def test_conv2d_without_jit():
    x, kernel, _ = map(jnp.float32, drawn((2, 6, 6, 4, 4, 3, 1, 1)))

    def value_and_gradient():
        return jax.value_and_grad(lambda kernel: jnp.square(conv2d(x, kernel, 1)).sum())(kernel)

    expected = value_and_gradient()
    with jax.disable_jit():
        actual = value_and_gradient()
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def lowered(product, operands, shape, impl, platform):
    """One of the three products of lanes, and its text, as it is for a platform."""
    sides, window = drawn(shape)[0].shape[1:3], drawn(shape)[1].shape[:2]
    of = Convolution(sides, window, *shape[6:], impl)
    of_lanes = jax.jit(partial(apply_per_lane, product, of=of, platform=platform))
    return of_lanes(*operands), of_lanes.lower(*operands).as_text()


PRODUCTS = (
    conv_products.compute_output,
    conv_products.compute_input_gradient,
    conv_products.compute_kernel_gradient,
)


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[7], SHAPES[10]])
@pytest.mark.parametrize("impl", CONV_IMPLS)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_lanes_of_all_impls_and_platforms(shape, impl, platform):
    """A CPU can run what is made for others; barriers are for CPUs alone."""
    scales = np.float32([1, -0.5, 3])[:, None, None, None, None]
    x, kernel, cotangent = (scales * array for array in drawn(shape))
    arguments = ((x, kernel), (cotangent, kernel), (x, cotangent))
    result = [
        lowered(*each, shape, impl, platform) for each in zip(PRODUCTS, arguments, strict=True)
    ]
    for (actual, text), exact in zip(result, products_in_float64(shape), strict=True):
        for lane, scale in zip(actual, scales.ravel(), strict=True):
            assert_close([lane], [exact * scale**2])
        if platform != "cpu":
            assert "optimization_barrier" not in text
            expected = {"native": 1, "unrolled": 3, "auto": int(platform == "tpu")}.get(impl, 0)
            assert text.count("stablehlo.convolution") == expected


def test_auto_impl_by_platform_and_lanes():
    shape = SHAPES[2]
    x, kernel, _ = (array[None] for array in drawn(shape))
    for platform, lanes, count in (("gpu", 1, 1), ("gpu", 3, 0), ("tpu", 1, 1), ("tpu", 3, 1)):
        operands = [np.repeat(array, lanes, axis=0) for array in (x, kernel)]
        text = lowered(conv_products.compute_output, operands, shape, "auto", platform)[1]
        assert text.count("stablehlo.convolution") == count


class FlaxConvolution(flax.linen.Module):
    """One convolution layer of flax."""

    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.Conv(4, (3, 3))(x)
        return flax.linen.Dense(4)(x.reshape(len(x), -1))


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize(
    "network", ["convnet", "cnn", *map(slow_case, ("fsl_cnn", "resnet18")), "flax"]
)
def test_configure_compute_sets_auto_impl(network, precision):
    """For both gradients too, and for no convolution that has an implementation of its own."""

    def count_native(impl, chosen):
        side = 8 if network == "flax" else 16
        if network == "flax":
            model = to_model(FlaxConvolution(), (side, side, 1), 4)
        else:
            options = {"width": 2} if network in ("convnet", "resnet18") else {}
            model = make_model(network, (side, side, 1), 4, conv_impl=impl, **options)
        model = configure_compute(model, conv_impl=chosen, precision=precision)
        variables = model.init(jax.random.key(0))
        x = jnp.ones((2, side, side, 1))

        def loss(params, x):
            return model.apply({**variables, "params": params}, x, train=True)[0].sum()

        text = jax.jit(jax.grad(loss)).lower(variables["params"], x).as_text()
        return text.count("stablehlo.convolution")

    assert count_native("auto", "im2col") == 0
    assert count_native("auto", "native") >= 2
    if network != "flax":
        assert count_native("im2col", "native") == 0


@pytest.mark.parametrize("impl", ["native", "im2col"])
def test_conv2d_keeps_precision_of_call(impl):
    """And that of its derivatives: not that of where it is compiled."""
    x, kernel, cotangent = drawn(SHAPES[2])

    def products(x, kernel, cotangent):
        with jax.default_matmul_precision("tensorfloat32"):
            output, pull = jax.vjp(convolution(SHAPES[2], impl), x, kernel)
        return output, pull(cotangent)

    text = jax.jit(products).lower(x, kernel, cotangent).as_text()
    of_products = re.findall(r"stablehlo\.(?:convolution|dot_general).*", text)
    assert len(of_products) == 3
    assert all("HIGH" in line and "HIGHEST" not in line for line in of_products), of_products
