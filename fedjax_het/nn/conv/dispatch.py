"""By what the three products of a convolution are computed.

On GPUs it is the native convolution of one kernel, and products of matrices of several (lanes):
mapped over kernels, a native one is a grouped one, which libraries are slow at. A TPU's compiler
knows such ones, and pads the channels of patches to its registers' width, which takes half as much
memory again, so there it is the native one. On CPUs the native one takes half the time of products
of matrices, whose patches have to be written and read, but for few channels, for windows of one
pixel or that skip some, and where its padding is in vain; it has float32 alone. (Measured with 4 to
64 samples of 28 x 28 to 8 x 8 pixels, windows of 3 x 3 and 5 x 5 and 1 to 128 channels.)
"""

import math
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from fedjax_het.nn.conv import im2col, native

ConvImpl = Literal["auto", "native", "im2col", "unrolled"]
AUTO, NATIVE, IM2COL, UNROLLED = CONV_IMPLS = get_args(ConvImpl)

MAX_PADDING_RATIO = 1.4  # pixels of an input gradient for each of its outputs: the rest is padding

Sides = tuple[int, int]  # height, width


class Convolution(NamedTuple):
    """What is static about one."""

    size: Sides  # of the input
    window: Sides
    padding: int
    stride: int
    impl: str
    precision: str | None = None  # of its products, as jax names them; None: the backend's own

    @property
    def output_size(self) -> Sides:
        height, width = (
            (pixels + 2 * self.padding - window_side) // self.stride + 1
            for pixels, window_side in zip(self.size, self.window, strict=True)
        )
        return height, width


def resolve_auto_impl(convolution: Convolution, lanes: int, platform: str) -> Convolution:
    """The same with what is automatic chosen for so many kernels side by side; on a CPU each
    product chooses for itself."""
    if convolution.impl != AUTO or platform == "cpu":
        return convolution
    return convolution._replace(impl=NATIVE if lanes == 1 or platform == "tpu" else IM2COL)


def compute_output(convolution: Convolution, x: Array, kernel: Array, *, cpu: bool) -> Array:
    """-> [B, H', W', O] of x [B, H, W, I] and kernel [kh, kw, I, O]."""
    channels, features = kernel.shape[2:]
    is_native_faster = features >= 32 or channels * features >= 128
    if not _is_native(convolution, x, cpu=cpu, is_native_faster=is_native_faster):
        return im2col.compute_output(
            x, kernel, padding=convolution.padding, stride=convolution.stride
        )
    compute = native.compute_output_on_cpu if cpu else native.compute_output
    return compute(x, kernel, padding=convolution.padding, stride=convolution.stride)


def compute_kernel_gradient(
    convolution: Convolution, x: Array, outputs: Array, *, cpu: bool
) -> Array:
    """-> [kh, kw, I, O], of x and of a cotangent of the outputs [B, H', W', O]."""
    has_unit_stride = convolution.stride == 1
    if not _is_native(convolution, x, cpu=cpu, is_native_faster=has_unit_stride):
        return im2col.compute_kernel_gradient(
            x,
            outputs,
            window=convolution.window,
            padding=convolution.padding,
            stride=convolution.stride,
            cpu=cpu,
        )
    if cpu and has_unit_stride:
        return native.compute_kernel_gradient_on_cpu(x, outputs, padding=convolution.padding)
    return native.compute_kernel_gradient(
        x,
        outputs,
        window=convolution.window,
        padding=convolution.padding,
        stride=convolution.stride,
    )


def compute_input_gradient(
    convolution: Convolution, outputs: Array, kernel: Array, *, cpu: bool
) -> Array:
    """-> [B, H, W, I] of a cotangent of the outputs and of the kernel."""
    channels, features = kernel.shape[2:]
    is_plain_convolution = convolution.stride == 1 and convolution.padding < min(convolution.window)
    has_little_padding = math.prod(convolution.size) <= MAX_PADDING_RATIO * math.prod(
        convolution.output_size
    )
    is_native_faster = (
        is_plain_convolution and has_little_padding and channels > 1 and channels * features >= 96
    )
    if not _is_native(convolution, outputs, cpu=cpu, is_native_faster=is_native_faster):
        return im2col.compute_input_gradient(
            outputs,
            kernel,
            size=convolution.size,
            padding=convolution.padding,
            stride=convolution.stride,
            cpu=cpu,
        )
    if cpu and is_plain_convolution:
        return native.compute_input_gradient_on_cpu(outputs, kernel, padding=convolution.padding)
    return native.compute_input_gradient(
        outputs,
        kernel,
        size=convolution.size,
        padding=convolution.padding,
        stride=convolution.stride,
    )


def _is_native(
    convolution: Convolution, array: Array, *, cpu: bool, is_native_faster: bool
) -> bool:
    if convolution.impl != AUTO or not cpu:
        return convolution.impl != IM2COL
    return is_native_faster and max(convolution.window) > 1 and array.dtype == jnp.float32
