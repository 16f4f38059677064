"""The three products of a convolution as calls of the backend's convolution.

XLA's library for CPUs takes a convolution whose operands are laid out as it expects (samples,
pixels, channels) and whose padding is less than its window. Others, among them what `jax.grad`
makes of one, go through a loop that is ten to a hundred times slower. Hence forms of their own for
CPUs, and barriers, without which XLA undoes them.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.nn.micro_batch import accumulate_micro_batches
from fedjax_het.utils.arrays import pad_rows

Sides = tuple[int, int]  # height, width

CACHED_PIXELS = 4096  # of a channel's outputs: the kernel's gradient takes so many at once

barrier = jax.lax.optimization_barrier


def compute_output(x: Array, kernel: Array, *, padding: int, stride: int) -> Array:
    """-> [B, H', W', O] of x [B, H, W, I] and kernel [kh, kw, I, O]."""
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
    """-> [kh, kw, I, O], of x and of a cotangent of the outputs [B, H', W', O]."""
    kernel = jax.ShapeDtypeStruct((*window, x.shape[-1], outputs.shape[-1]), x.dtype)
    transpose = jax.linear_transpose(
        lambda kernel: compute_output(x, kernel, padding=padding, stride=stride), kernel
    )
    return transpose(outputs)[0]


def compute_input_gradient(
    outputs: Array, kernel: Array, *, size: Sides, padding: int, stride: int
) -> Array:
    """-> [B, H, W, I], H and W being `size`, of a cotangent of the outputs and of the kernel."""
    x = jax.ShapeDtypeStruct((len(outputs), *size, kernel.shape[2]), outputs.dtype)
    transpose = jax.linear_transpose(
        lambda x: compute_output(x, kernel, padding=padding, stride=stride), x
    )
    return transpose(outputs)[0]


def compute_output_on_cpu(x: Array, kernel: Array, *, padding: int, stride: int) -> Array:
    """The same as `output`, of any padding; channels are filled up to a multiple of four, by which
    the library goes faster."""
    channels = x.shape[-1]
    num_padding_channels = -channels % 4 if channels > 1 else 0
    if num_padding_channels or padding >= min(kernel.shape[:2]):
        x, padding = barrier(_pad_images(x, padding, num_padding_channels)), 0
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, num_padding_channels), (0, 0)))
    return compute_output(x, kernel, padding=padding, stride=stride)


def compute_kernel_gradient_on_cpu(x: Array, outputs: Array, *, padding: int) -> Array:
    """The same as `compute_kernel_gradient` of stride 1.

    A number of the kernel is the product of a channel of the input, moved, with one of the outputs:
    a convolution of images that have samples as channels, whose kernel are the outputs. The library
    wants fours of them.
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
    """The same as `compute_input_gradient` of stride 1 and a padding less than the window.

    A pixel of the input had a part in the outputs around it, the other way round.
    """
    flipped_kernel = barrier(kernel[::-1, ::-1].swapaxes(2, 3))
    margins = [(kernel_side - 1 - padding,) * 2 for kernel_side in kernel.shape[:2]]
    return jax.lax.conv_general_dilated(
        outputs, flipped_kernel, (1, 1), margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pad_images(x: Array, padding: int, num_padding_channels: int = 0) -> Array:
    margins = [
        (0, 0, 0),
        (padding, padding, 0),
        (padding, padding, 0),
        (0, num_padding_channels, 0),
    ]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
