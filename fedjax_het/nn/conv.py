"""Two-dimensional convolution as a JAX primitive with both of its derivatives.

A convolution is linear in its input and in its kernel. The two products of its derivatives are
also linear in both operands: outputs and kernel to input, and input and outputs to kernel. Each of
the three is a derivative of the others, so three primitives are closed under `jax.grad` and
`jax.jvp` in any order and number. The implementation is chosen when a program is lowered, for the
platform and the shapes, see `fedjax_het.nn.conv_products`.
"""

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fedjax_het.nn import conv_products
from fedjax_het.nn.conv_products import CONV_IMPLS, UNROLLED, Convolution
from fedjax_het.utils.errors import require_name


def conv2d(x: Array, kernel: Array, padding: int, impl: str = "auto", stride: int = 1) -> Array:
    """Cross-correlate images with a kernel, with zero padding on all sides.

    All implementations agree up to rounding. Cost: kh kw I multiply-adds for each number of the
    result. Mapped over kernels (lanes), a CPU computes one lane after the other, and each lane
    gives the same numbers as alone.

    Args:
      x: images, `[B, H, W, I]`.
      kernel: `[kh, kw, I, O]`.
      padding: zeros on all sides in pixels.
      impl: "native": the backend's convolution, which a GPU or TPU computes as a grouped one for
        several kernels (lanes). "im2col": matrix products. "unrolled": one native convolution per
        lane. "auto": on a CPU the faster of native and im2col for each product; on a TPU native. On
        other devices it is native for one kernel and im2col for several. In a `Model`,
        `configure_compute` can replace "auto".
      stride: distance of windows in pixels.

    Returns:
      `[B, (H + 2 padding - kh) // stride + 1, (W + 2 padding - kw) // stride + 1, O]`, of the
      promoted dtype of `x` and `kernel`.

    Raises:
      ConfigError: if `impl` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.nn import conv2d
      >>> conv2d(jnp.zeros((2, 5, 5, 3)), jnp.zeros((3, 3, 3, 4)), padding=1).shape
      (2, 5, 5, 4)
    """
    require_name("conv_impl", impl, CONV_IMPLS)
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    (height, width), (rows, columns) = x.shape[1:3], kernel.shape[:2]
    # jax adds settings to `jax.config` at run time, so its type stubs do not contain them.
    settings: Any = jax.config
    precision = settings.jax_default_matmul_precision
    convolution = Convolution((height, width), (rows, columns), padding, stride, impl, precision)
    return CONV_OUTPUT.bind(x[None], kernel[None], of=convolution)[0]


def apply_per_lane(
    function: Callable, left: Array, right: Array, *, of: Convolution, platform: str
) -> Array:
    """Compute one of the three products for arrays with a leading axis of lanes.

    Args:
      function: `(of, left, right, *, cpu) -> array`, the product of one lane.
      left: first operand, `[L, ...]`.
      right: second operand, `[L, ...]`.
      of: static parameters of the convolution.
      platform: "cpu", "tpu" or another platform that the product is lowered for.

    Returns:
      `[L, ...]`.
    """
    lanes, cpu = left.shape[0], platform == "cpu"
    lane_function = partial(function, conv_products.resolve_auto_impl(of, lanes, platform), cpu=cpu)
    with set_matmul_precision(of.precision):  # lowering happens outside of the caller's context
        if lanes == 1:
            return lane_function(left[0], right[0])[None]
        if of.impl == UNROLLED:
            return jnp.stack([lane_function(left[lane], right[lane]) for lane in range(lanes)])
        if cpu:
            return jax.lax.map(lambda operands: lane_function(*operands), (left, right))
        return jax.vmap(lane_function)(left, right)


def _make_primitive(name: str, output_shape: Callable, function: Callable) -> Primitive:
    """Create a primitive on two arrays with a leading axis of lanes, `[L, ...]` each.

    Args:
      name: name of the primitive.
      output_shape: `(left shape, right shape, of) -> shape` of the result.
      function: `(of, left, right, *, cpu) -> array` without lanes.

    Returns:
      The primitive, with its rules for shapes, evaluation and lowering.
    """
    primitive = Primitive(name)

    @primitive.def_abstract_eval
    def _(left, right, *, of):
        return left.update(shape=output_shape(left.shape, right.shape, of), weak_type=False)

    @primitive.def_impl
    def _(left, right, *, of):
        (platform,) = {device.platform for device in jnp.asarray(left).devices()}
        return _compile(function, of, platform)(left, right)

    for platform in (None, "cpu", "tpu"):  # None: all other platforms
        lowering_function = partial(apply_per_lane, function, platform=platform or "gpu")
        lowering_rule = mlir.lower_fun(lowering_function, multiple_results=False)
        mlir.register_lowering(primitive, lowering_rule, platform=platform)
    return primitive


def set_matmul_precision(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a matmul precision by jax's name; None leaves it unchanged."""
    return contextlib.nullcontext() if name is None else jax.default_matmul_precision(name)


@cache
def _compile(function: Callable, convolution: Convolution, platform: str) -> Callable:
    """Compile the evaluation of a primitive outside of `jax.jit`."""
    return jax.jit(partial(apply_per_lane, function, of=convolution, platform=platform))


CONV_OUTPUT = _make_primitive(
    "conv2d",
    lambda x, kernel, of: (*x[:2], *of.output_size, kernel[-1]),
    conv_products.compute_output,
)
CONV_INPUT_GRADIENT = _make_primitive(
    "conv2d_input",
    lambda outputs, kernel, of: (*outputs[:2], *of.size, kernel[-2]),
    conv_products.compute_input_gradient,
)
CONV_KERNEL_GRADIENT = _make_primitive(
    "conv2d_kernel",
    lambda x, outputs, of: (x[0], *of.window, x[-1], outputs[-1]),
    conv_products.compute_kernel_gradient,
)

ad.defbilinear(
    CONV_OUTPUT,
    lambda outputs, _, kernel, *, of: CONV_INPUT_GRADIENT.bind(outputs, kernel, of=of),
    lambda outputs, x, _, *, of: CONV_KERNEL_GRADIENT.bind(x, outputs, of=of),
)
ad.defbilinear(
    CONV_INPUT_GRADIENT,
    lambda x, _, kernel, *, of: CONV_OUTPUT.bind(x, kernel, of=of),
    lambda x, outputs, _, *, of: CONV_KERNEL_GRADIENT.bind(x, outputs, of=of),
)
ad.defbilinear(
    CONV_KERNEL_GRADIENT,
    lambda kernel, _, outputs, *, of: CONV_INPUT_GRADIENT.bind(outputs, kernel, of=of),
    lambda kernel, x, _, *, of: CONV_OUTPUT.bind(x, kernel, of=of),
)


def _batch_as_lanes(primitive, operands, axes, *, of):
    """Batch a primitive for `jax.vmap`: the mapped axis becomes lanes."""
    pairs = list(zip(operands, axes, strict=True))
    axis_size = next(operand.shape[axis] for operand, axis in pairs if axis is not None)

    def merge(operand, axis):
        if axis is None:
            operand = jnp.broadcast_to(operand[None], (axis_size, *operand.shape))
        else:
            operand = jnp.moveaxis(operand, axis, 0)
        return operand.reshape(-1, *operand.shape[2:])

    out = primitive.bind(*(merge(operand, axis) for operand, axis in pairs), of=of)
    return out.reshape(axis_size, -1, *out.shape[1:]), 0


def _batch_as_samples(primitive, operands, axes, *, of):
    """Batch a primitive whose second operand is a kernel.

    If all share one kernel, the mapped axis adds samples.
    """
    samples, kernel = operands
    if axes[1] is not None:
        return _batch_as_lanes(primitive, operands, axes, of=of)
    samples = jnp.moveaxis(samples, axes[0], 1)  # [L, axis_size, B, ...]
    lanes, axis_size, batch = samples.shape[:3]
    merged = samples.reshape(lanes, axis_size * batch, *samples.shape[3:])
    out = primitive.bind(merged, kernel, of=of)
    return out.reshape(lanes, axis_size, batch, *out.shape[2:]), 1


batching.primitive_batchers[CONV_OUTPUT] = partial(_batch_as_samples, CONV_OUTPUT)
batching.primitive_batchers[CONV_INPUT_GRADIENT] = partial(_batch_as_samples, CONV_INPUT_GRADIENT)
batching.primitive_batchers[CONV_KERNEL_GRADIENT] = partial(_batch_as_lanes, CONV_KERNEL_GRADIENT)
