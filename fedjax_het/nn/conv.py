"""Two-dimensional convolution, as matrix products or as the backend's own.

XLA:CPU runs a convolution inside a `while` body (every `scan`) through a naive loop, ten to eighty
times slower than a matrix product of the same size; elsewhere the native convolution is the fast
one. Both forms take the same HWIO kernel and agree to rounding.
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_het.common.errors import require_name
from fedjax_het.nn.micro_batch import piece_size

barrier = jax.lax.optimization_barrier

CACHED_PATCHES = 2**17  # numbers: 0.5 MB, which several arrays of a step share the cache with

CONV_IMPLS = ("auto", "native", "im2col")

_native = ContextVar("native convolutions", default=False)


@contextlib.contextmanager
def native_convolutions() -> Iterator[None]:
    """Inside, `auto` is `native` on every backend, for traces that are compared between them."""
    before = _native.set(True)
    try:
        yield
    finally:
        _native.reset(before)


def resolve_conv_impl(impl: str) -> str:
    """`auto` becomes `im2col` on the CPU backend and `native` elsewhere; asks jax which it is."""
    require_name("conv_impl", impl, CONV_IMPLS)
    if impl != "auto":
        return impl
    return "im2col" if jax.default_backend() == "cpu" and not _native.get() else "native"


def conv2d(
    x: jax.Array,
    kernel: jax.Array,
    padding: int,
    impl: str = "auto",
    stride: int = 1,
    *,
    in_pieces: bool = False,
) -> jax.Array:
    """Cross-correlate `x` [B, H, W, I] with `kernel` [kh, kw, I, O], zero padding on all sides.

    Returns [B, (H + 2 padding - kh) // stride + 1, (W + 2 padding - kw) // stride + 1, O]. `im2col`
    keeps the patches for its backward pass, kh kw numbers for each output pixel and input channel.
    It has a reverse rule of its own that can be differentiated again; forward mode (`jax.jvp`)
    needs `native`.

    in_pieces: `im2col` takes a few samples at a time, whose patches fit a core's cache, and makes
        them again in the backward pass. For networks that mix samples (batch norm), which cannot be
        trained in micro-batches as a whole: 1.3 to 1.5 times faster for a ConvNet's step.
    """
    if resolve_conv_impl(impl) == "im2col":
        if in_pieces:
            return _in_pieces(x, kernel, padding, stride)
        return _conv2d_im2col(x, kernel, padding, stride, x.shape[1:3])
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=[(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _in_pieces(x, kernel, padding, stride):
    """`_conv2d_im2col`, piece by piece of the batch where the patches of all are too many."""
    sides = [(x.shape[a] + 2 * padding - kernel.shape[a - 1]) // stride + 1 for a in (1, 2)]
    patches = math.prod(sides) * math.prod(kernel.shape[:3])  # of a sample
    piece = piece_size(len(x), max(1, CACHED_PATCHES // patches))

    def convolve(samples):
        return _conv2d_im2col(samples, kernel, padding, stride, x.shape[1:3])

    if piece == len(x):
        return convolve(x)
    pieces = x.reshape(-1, piece, *x.shape[1:])
    out = jax.lax.map(jax.checkpoint(convolve), pieces)
    return out.reshape(-1, *out.shape[2:])


def _patches(x, kernel_height, kernel_width, padding, stride):
    """[B, H', W', kh kw I]: for each output pixel what the kernel sees, in the kernel's order."""
    margins = [(0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
    height = x.shape[1] - kernel_height + 1
    width = x.shape[2] - kernel_width + 1
    shifted = [
        x[:, row : row + height : stride, column : column + width : stride]
        for row in range(kernel_height)
        for column in range(kernel_width)
    ]
    return jnp.concatenate(shifted, axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _conv2d_im2col(x, kernel, padding, stride, size):
    return _forward(x, kernel, padding, stride, size)[0]


def _forward(x, kernel, padding, stride, size):
    height, width = kernel.shape[:2]
    patches = _patches(x, height, width, padding, stride)
    return patches @ kernel.reshape(-1, kernel.shape[-1]), (patches, kernel)


def _backward(padding, stride, size, residuals, grad):
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
    if stride == 1:
        x_grad = _sum_of_patches(shares, padding)
    else:
        x_grad = _sum_of_strided_patches(shares, padding, stride, size)
    return x_grad, kernel_grad.reshape(kernel.shape)


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


def _sum_of_strided_patches(shares, padding, stride, size):
    """The same where patches begin `stride` pixels apart in an input of `size` (height, width).

    Pixels whose rows and columns leave the same remainders share patches with each other alone:
    each such part of the input is a sum of patches of stride 1.
    """
    batch, *_, channels = shares.shape
    height, width = (-(-(pixels + 2 * padding) // stride) for pixels in size)

    def part(row, column):
        sharing = shares[:, :, :, row::stride, column::stride]
        if sharing.size == 0:  # a kernel smaller than its stride skips pixels
            return jnp.zeros((batch, height, width, channels), shares.dtype)
        total = _sum_of_patches(sharing, 0)
        unread = (height - total.shape[1], width - total.shape[2])
        return jnp.pad(total, ((0, 0), (0, unread[0]), (0, unread[1]), (0, 0)))

    rows = [jnp.stack([part(r, c) for c in range(stride)], axis=3) for r in range(stride)]
    total = jnp.stack(rows, axis=2).reshape(batch, height * stride, width * stride, channels)
    return total[:, padding : padding + size[0], padding : padding + size[1]]


_conv2d_im2col.defvjp(_forward, _backward)
