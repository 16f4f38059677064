"""Two-dimensional convolution of stride 1, as matrix products or as the backend's own.

XLA:CPU runs a convolution inside a `while` body (every `scan`) through a naive loop, ten to eighty
times slower than a matrix product of the same size; elsewhere the native convolution is the fast
one. Both forms take the same HWIO kernel and agree to rounding.
"""

from functools import partial

import jax
import jax.numpy as jnp

from fedjax_het.errors import require_name

barrier = jax.lax.optimization_barrier

CONV_IMPLS = ("auto", "native", "im2col")


def resolve_conv_impl(impl: str) -> str:
    """`auto` becomes `im2col` on the CPU backend and `native` elsewhere; asks jax which it is."""
    require_name("conv_impl", impl, CONV_IMPLS)
    if impl != "auto":
        return impl
    return "im2col" if jax.default_backend() == "cpu" else "native"


def conv2d(x: jax.Array, kernel: jax.Array, padding: int, impl: str = "auto") -> jax.Array:
    """Cross-correlate `x` [B, H, W, I] with `kernel` [kh, kw, I, O], zero padding on all sides.

    Returns [B, H + 2 padding - kh + 1, W + 2 padding - kw + 1, O]. `im2col` keeps the patches for
    its backward pass, kh kw times the padded input. It has a reverse rule of its own that can be
    differentiated again; forward mode (`jax.jvp`) needs `native`.
    """
    if resolve_conv_impl(impl) == "im2col":
        return _conv2d_im2col(x, kernel, padding)
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1, 1),
        padding=[(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _patches(x, kernel_height, kernel_width, padding_height, padding_width):
    """[B, H', W', kh kw I]: for each output pixel what the kernel sees, in the kernel's order.

    A negative padding crops.
    """
    margins = [(0, 0, 0), (padding_height,) * 2 + (0,), (padding_width,) * 2 + (0,), (0, 0, 0)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
    height = x.shape[1] - kernel_height + 1
    width = x.shape[2] - kernel_width + 1
    shifted = [
        x[:, row : row + height, column : column + width]
        for row in range(kernel_height)
        for column in range(kernel_width)
    ]
    return jnp.concatenate(shifted, axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _conv2d_im2col(x, kernel, padding):
    return _forward(x, kernel, padding)[0]


def _forward(x, kernel, padding):
    patches = _patches(x, *kernel.shape[:2], padding, padding)
    return patches @ kernel.reshape(-1, kernel.shape[-1]), (patches, kernel)


def _backward(padding, residuals, grad):
    """By matrix products of plain row-major operands, which is what the fast routine takes.

    Folded into a product, as XLA would, a transposition leaves that routine; hence the barriers.
    """
    patches, kernel = residuals
    out_channels = kernel.shape[-1]
    columns, grads = patches.reshape(-1, patches.shape[-1]), grad.reshape(-1, out_channels)
    if columns.shape[1] <= out_channels:  # the narrower of the two is the one to transpose
        kernel_grad = barrier(columns.T) @ grads
    else:
        kernel_grad = barrier(barrier(grads.T) @ columns).T
    turned = barrier(kernel.reshape(-1, out_channels).T)
    shares = barrier(grads @ turned).reshape(*grad.shape[:3], *kernel.shape[:3])
    return _sum_of_patches(shares, padding), kernel_grad.reshape(kernel.shape)


def _sum_of_patches(shares, padding):
    """The transpose of `_patches`: add [B, H', W', kh, kw, I] up, where each was read."""
    batch, height, width, kernel_height, kernel_width, channels = shares.shape
    margins = (batch, height + kernel_height - 1, width + kernel_width - 1, channels)
    total = jnp.zeros(margins, shares.dtype)
    for row in range(kernel_height):
        for column in range(kernel_width):
            here = (slice(None), slice(row, row + height), slice(column, column + width))
            total = total.at[here].add(shares[:, :, :, row, column])
    bottom, right = total.shape[1] - padding, total.shape[2] - padding
    return total[:, padding:bottom, padding:right]


_conv2d_im2col.defvjp(_forward, _backward)
