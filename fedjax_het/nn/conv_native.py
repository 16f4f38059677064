"""The three products of a convolution as calls of the backend's convolution.

XLA's library for CPUs takes a convolution whose operands are laid out as it expects (samples,
pixels, channels) and whose padding is less than its window. Others, among them what `jax.grad`
makes of one, go through a loop that is ten to a hundred times slower. Hence forms of their own for
CPUs, and barriers, without which XLA undoes them.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.common.arrays import with_rows_of_zeros
from fedjax_het.nn.micro_batch import in_pieces

Sides = tuple[int, int]  # height, width

CACHED_PIXELS = 4096  # of a channel's outputs: the kernel's gradient takes so many at once

barrier = jax.lax.optimization_barrier


def output(x: Array, kernel: Array, *, padding: int, stride: int) -> Array:
    """-> [B, H', W', O] of x [B, H, W, I] and kernel [kh, kw, I, O]."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=[(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def kernel_gradient(x: Array, outputs: Array, *, window: Sides, padding: int, stride: int) -> Array:
    """-> [kh, kw, I, O], of x and of a cotangent of the outputs [B, H', W', O]."""
    kernel = jax.ShapeDtypeStruct((*window, x.shape[-1], outputs.shape[-1]), x.dtype)
    transposed = jax.linear_transpose(
        lambda kernel: output(x, kernel, padding=padding, stride=stride), kernel
    )
    return transposed(outputs)[0]


def input_gradient(
    outputs: Array, kernel: Array, *, size: Sides, padding: int, stride: int
) -> Array:
    """-> [B, H, W, I], H and W being `size`, of a cotangent of the outputs and of the kernel."""
    x = jax.ShapeDtypeStruct((len(outputs), *size, kernel.shape[2]), outputs.dtype)
    transposed = jax.linear_transpose(
        lambda x: output(x, kernel, padding=padding, stride=stride), x
    )
    return transposed(outputs)[0]


def output_on_cpu(x: Array, kernel: Array, *, padding: int, stride: int) -> Array:
    """The same as `output`, of any padding; channels are filled up to a multiple of four, by which
    the library goes faster."""
    channels = x.shape[-1]
    missing = -channels % 4 if channels > 1 else 0
    if missing or padding >= min(kernel.shape[:2]):
        x, padding = barrier(_padded(x, padding, missing)), 0
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, 0)))
    return output(x, kernel, padding=padding, stride=stride)


def kernel_gradient_on_cpu(x: Array, outputs: Array, *, padding: int) -> Array:
    """The same as `kernel_gradient` of stride 1.

    A number of the kernel is the product of a channel of the input, moved, with one of the outputs:
    a convolution of images that have samples as channels, whose kernel are the outputs. The library
    wants fours of them.
    """

    def of_piece(piece: tuple[Array, Array]) -> tuple[Array, tuple[()]]:
        x, outputs = barrier(piece)
        missing = -len(x) % 4
        images = with_rows_of_zeros(_padded(x, padding), missing)
        images = barrier(images.transpose(3, 1, 2, 0))
        kernel = barrier(with_rows_of_zeros(outputs, missing).transpose(1, 2, 0, 3))
        return output(images, kernel, padding=0, stride=1).transpose(1, 2, 0, 3), ()

    pixels = outputs.shape[1] * outputs.shape[2]
    at_once = max(4, CACHED_PIXELS // pixels // 4 * 4)
    return in_pieces(of_piece, (x, outputs), micro_batch=at_once)[0]


def input_gradient_on_cpu(outputs: Array, kernel: Array, *, padding: int) -> Array:
    """The same as `input_gradient` of stride 1 and a padding less than the window.

    A pixel of the input had a part in the outputs around it, the other way round.
    """
    turned = barrier(kernel[::-1, ::-1].swapaxes(2, 3))
    margins = [(reach - 1 - padding,) * 2 for reach in kernel.shape[:2]]
    return jax.lax.conv_general_dilated(
        outputs, turned, (1, 1), margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _padded(x: Array, padding: int, missing_channels: int = 0) -> Array:
    margins = [(0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, missing_channels, 0)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
