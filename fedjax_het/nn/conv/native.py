"""A convolution and its two gradients as calls of the backend's convolution.

XLA's CPU library accepts a convolution with operands in its layout (samples, pixels, channels) and
a padding smaller than the window. Other convolutions, including those from `jax.grad`, run in a
loop that is 10 to 100 times slower. The functions `*_on_cpu` avoid such convolutions. Their
barriers keep XLA from undoing this.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.nn.micro_batch import accumulate_micro_batches
from fedjax_het.utils.arrays import pad_rows

Sides = tuple[int, int]  # height, width

CACHED_PIXELS = 4096  # output pixels per channel that one piece of the kernel gradient reads

barrier = jax.lax.optimization_barrier


def compute_output(x: Array, kernel: Array, *, padding: int, stride: int) -> Array:
    """Compute the output of a convolution.

    Args:
      x: input, `[B, H, W, I]`.
      kernel: `[kh, kw, I, O]`.
      padding: zeros on all sides in pixels.
      stride: distance of windows in pixels.

    Returns:
      `[B, H', W', O]`.
    """
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=[(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def compute_kernel_gradient(
    x: Array, outputs: Array, *, window: Sides, padding: int, stride: int
) -> Array:
    """Compute the gradient with respect to the kernel.

    Args:
      x: input, `[B, H, W, I]`.
      outputs: cotangent of the output, `[B, H', W', O]`.
      window: height and width of the kernel, kh and kw.
      padding: zeros on all sides in pixels.
      stride: distance of windows in pixels.

    Returns:
      `[kh, kw, I, O]`.
    """
    kernel = jax.ShapeDtypeStruct((*window, x.shape[-1], outputs.shape[-1]), x.dtype)
    transpose = jax.linear_transpose(
        lambda kernel: compute_output(x, kernel, padding=padding, stride=stride), kernel
    )
    return transpose(outputs)[0]


def compute_input_gradient(
    outputs: Array, kernel: Array, *, size: Sides, padding: int, stride: int
) -> Array:
    """Compute the gradient with respect to the input.

    Args:
      outputs: cotangent of the output, `[B, H', W', O]`.
      kernel: `[kh, kw, I, O]`.
      size: height and width of the input, H and W.
      padding: zeros on all sides in pixels.
      stride: distance of windows in pixels.

    Returns:
      `[B, H, W, I]`.
    """
    x = jax.ShapeDtypeStruct((len(outputs), *size, kernel.shape[2]), outputs.dtype)
    transpose = jax.linear_transpose(
        lambda x: compute_output(x, kernel, padding=padding, stride=stride), x
    )
    return transpose(outputs)[0]


def compute_output_on_cpu(x: Array, kernel: Array, *, padding: int, stride: int) -> Array:
    """Compute the output of a convolution in the form that is fast on a CPU.

    Any padding is allowed. Channels are padded to a multiple of four, which speeds up the library.

    Args:
      x: input, `[B, H, W, I]`.
      kernel: `[kh, kw, I, O]`.
      padding: zeros on all sides in pixels.
      stride: distance of windows in pixels.

    Returns:
      `[B, H', W', O]`.
    """
    channels = x.shape[-1]
    num_padding_channels = -channels % 4 if channels > 1 else 0
    if num_padding_channels or padding >= min(kernel.shape[:2]):
        x, padding = barrier(_pad_images(x, padding, num_padding_channels)), 0
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, num_padding_channels), (0, 0)))
    return compute_output(x, kernel, padding=padding, stride=stride)


def compute_kernel_gradient_on_cpu(x: Array, outputs: Array, *, padding: int) -> Array:
    """Compute the gradient with respect to the kernel in the form that is fast on a CPU.

    Restricted to stride 1. Each number of the kernel gradient is the inner product of a shifted
    input channel with a channel of the outputs' cotangent. This is a convolution of images with
    samples as channels, whose kernel is the cotangent. Samples are padded to a multiple of four,
    which the library requires for speed.

    Args:
      x: input, `[B, H, W, I]`.
      outputs: cotangent of the output, `[B, H', W', O]`.
      padding: zeros on all sides in pixels.

    Returns:
      `[kh, kw, I, O]`.
    """

    def compute_piece(samples: tuple[Array, Array]) -> tuple[Array, tuple[()]]:
        x, outputs = barrier(samples)
        num_padding = -len(x) % 4
        images = pad_rows(_pad_images(x, padding), num_padding)
        images = barrier(images.transpose(3, 1, 2, 0))
        kernel = barrier(pad_rows(outputs, num_padding).transpose(1, 2, 0, 3))
        return compute_output(images, kernel, padding=0, stride=1).transpose(1, 2, 0, 3), ()

    pixels = outputs.shape[1] * outputs.shape[2]
    chunk_size = max(4, CACHED_PIXELS // pixels // 4 * 4)
    return accumulate_micro_batches(compute_piece, (x, outputs), micro_batch=chunk_size)[0]


def compute_input_gradient_on_cpu(outputs: Array, kernel: Array, *, padding: int) -> Array:
    """Compute the gradient with respect to the input in the form that is fast on a CPU.

    Restricted to stride 1 and a padding smaller than the window. The gradient is a convolution of
    the cotangent with the flipped kernel.

    Args:
      outputs: cotangent of the output, `[B, H', W', O]`.
      kernel: `[kh, kw, I, O]`.
      padding: zeros on all sides of the input in pixels.

    Returns:
      `[B, H, W, I]`.
    """
    flipped_kernel = barrier(kernel[::-1, ::-1].swapaxes(2, 3))
    margins = [(kernel_side - 1 - padding,) * 2 for kernel_side in kernel.shape[:2]]
    return jax.lax.conv_general_dilated(
        outputs, flipped_kernel, (1, 1), margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pad_images(x: Array, padding: int, num_padding_channels: int = 0) -> Array:
    """Add zeros around images and after the last channel."""
    margins = [
        (0, 0, 0),
        (padding, padding, 0),
        (padding, padding, 0),
        (0, num_padding_channels, 0),
    ]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
