"""Two-dimensional convolution of stride 1, as one matrix product or as the backend's own.

XLA:CPU runs a convolution inside a `while` body (every `scan`) through a naive loop, ten to eighty
times slower than a matrix product of the same size; elsewhere the native convolution is the fast
one. Both forms take the same HWIO kernel and agree to rounding.
"""

import jax
import jax.numpy as jnp

from fedjax_het.errors import require_name

CONV_IMPLS = ("auto", "native", "im2col")


def resolve_conv_impl(impl: str) -> str:
    """`auto` becomes `im2col` on the CPU backend and `native` elsewhere; asks jax which it is."""
    require_name("conv_impl", impl, CONV_IMPLS)
    if impl != "auto":
        return impl
    return "im2col" if jax.default_backend() == "cpu" else "native"


def conv2d(x: jax.Array, kernel: jax.Array, padding: int, impl: str = "auto") -> jax.Array:
    """Cross-correlate `x` [B, H, W, I] with `kernel` [kh, kw, I, O], zero padding on all sides.

    Returns [B, H + 2 padding - kh + 1, W + 2 padding - kw + 1, O]. `im2col` holds the patches,
    kh kw times the padded input.
    """
    if resolve_conv_impl(impl) == "native":
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(1, 1),
            padding=[(padding, padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    kernel_height, kernel_width, _, out_channels = kernel.shape
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    height = x.shape[1] - kernel_height + 1
    width = x.shape[2] - kernel_width + 1
    shifted = [
        x[:, row : row + height, column : column + width]
        for row in range(kernel_height)
        for column in range(kernel_width)
    ]
    patches = jnp.concatenate(shifted, axis=-1)
    return patches @ kernel.reshape(-1, out_channels)
