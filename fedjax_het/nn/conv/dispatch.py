"""Choice of the implementation of a convolution and of its two gradients.

* GPU: native convolution for one kernel, matrix products for several kernels (lanes). Mapped over
  kernels, a native convolution becomes a grouped one, which GPU libraries compute slowly.
* TPU: native convolution. The compiler supports grouped convolutions. For matrix products it would
  pad the channels of patches to the width of the registers, which takes 1.5 times the memory.
* CPU: native convolution takes half the time of matrix products, whose patches must be written and
  read. Matrix products are faster for few channels, for windows of one pixel, for strides above 1
  and where most of the padding would be wasted. The native form supports only float32. Measured
  with 4 to 64 samples of 28x28 to 8x8 pixels, windows of 3x3 and 5x5, and 1 to 128 channels.
"""

import math
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from fedjax_het.nn.conv import im2col, native

ConvImpl = Literal["auto", "native", "im2col", "unrolled"]
AUTO, NATIVE, IM2COL, UNROLLED = CONV_IMPLS = get_args(ConvImpl)

# Maximum input pixels per output pixel for the native input gradient on a CPU; above, the time for
# padding exceeds the gain.
MAX_PADDING_RATIO = 1.4

Sides = tuple[int, int]  # height, width


class Convolution(NamedTuple):
    """The static parameters of a convolution.

    Attributes:
      size: height and width of the input in pixels.
      window: height and width of the kernel in pixels.
      padding: zeros on all sides of the input in pixels.
      stride: distance of windows in pixels.
      impl: one of `CONV_IMPLS`.
      precision: jax's name of the matmul precision; None: the backend's default.
    """

    size: Sides
    window: Sides
    padding: int
    stride: int
    impl: str
    precision: str | None = None

    @property
    def output_size(self) -> Sides:
        """Return height and width of the output in pixels."""
        height, width = (
            (pixels + 2 * self.padding - window_side) // self.stride + 1
            for pixels, window_side in zip(self.size, self.window, strict=True)
        )
        return height, width


def resolve_auto_impl(convolution: Convolution, lanes: int, platform: str) -> Convolution:
    """Choose the implementation of a convolution with `impl="auto"`.

    Args:
      convolution: the convolution.
      lanes: number of kernels that are computed at once.
      platform: platform that the program is compiled for.

    Returns:
      The convolution with the chosen implementation. On a CPU it is unchanged, since each of the
      three products makes its own choice.
    """
    if convolution.impl != AUTO or platform == "cpu":
        return convolution
    return convolution._replace(impl=NATIVE if lanes == 1 or platform == "tpu" else IM2COL)


def compute_output(convolution: Convolution, x: Array, kernel: Array, *, cpu: bool) -> Array:
    """Compute the output of a convolution.

    Args:
      convolution: static parameters.
      x: input, `[B, H, W, I]`.
      kernel: `[kh, kw, I, O]`.
      cpu: whether to use the forms for CPUs.

    Returns:
      `[B, H', W', O]`.
    """
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
    """Compute the gradient with respect to the kernel.

    Args:
      convolution: static parameters.
      x: input, `[B, H, W, I]`.
      outputs: cotangent of the output, `[B, H', W', O]`.
      cpu: whether to use the forms for CPUs.

    Returns:
      `[kh, kw, I, O]`.
    """
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
    """Compute the gradient with respect to the input.

    Args:
      convolution: static parameters.
      outputs: cotangent of the output, `[B, H', W', O]`.
      kernel: `[kh, kw, I, O]`.
      cpu: whether to use the forms for CPUs.

    Returns:
      `[B, H, W, I]`.
    """
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
    """Return whether to use the native form; on a CPU the dtype of `array`, an operand, matters."""
    if convolution.impl != AUTO or not cpu:
        return convolution.impl != IM2COL
    return is_native_faster and max(convolution.window) > 1 and array.dtype == jnp.float32
