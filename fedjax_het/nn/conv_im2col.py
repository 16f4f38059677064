"""The three products of a convolution as products of matrices, of patches laid side by side.

On a CPU operands of products are plain and row-major, which is what the fast routines take: folded
into a product, as XLA would, a transposition leaves them. Hence the barriers there. Elsewhere
products take operands of any layout, and barriers would keep XLA from fusing what is around them.

Numbers of 16 bits are added up in 32.
"""

import jax
import jax.numpy as jnp
from jax import Array

Sides = tuple[int, int]  # height, width


def _barrier(array: Array, cpu: bool) -> Array:
    return jax.lax.optimization_barrier(array) if cpu else array


def output(x: Array, kernel: Array, *, padding: int, stride: int) -> Array:
    """-> [B, H', W', O] of x [B, H, W, I] and kernel [kh, kw, I, O]."""
    height, width = kernel.shape[:2]
    patches = _patches(x, (height, width), padding, stride)
    return patches @ kernel.reshape(-1, kernel.shape[-1])


def kernel_gradient(
    x: Array, outputs: Array, *, window: Sides, padding: int, stride: int, cpu: bool
) -> Array:
    """-> [kh, kw, I, O], of x and of a cotangent of the outputs [B, H', W', O]."""
    patches = _patches(x, window, padding, stride)
    columns, rows = (array.reshape(-1, array.shape[-1]) for array in (patches, outputs))
    if columns.shape[1] <= rows.shape[1]:  # the narrower of the two is the one to transpose
        kernel = _barrier(columns.T, cpu) @ rows
    else:
        kernel = _barrier(_barrier(rows.T, cpu) @ columns, cpu).T
    return kernel.reshape(*window, x.shape[-1], outputs.shape[-1])


def input_gradient(
    outputs: Array, kernel: Array, *, size: Sides, padding: int, stride: int, cpu: bool
) -> Array:
    """-> [B, H, W, I], H and W being `size`, of a cotangent of the outputs and of the kernel."""
    turned = _barrier(kernel.reshape(-1, kernel.shape[-1]).T, cpu)
    shares = _barrier(outputs.reshape(-1, kernel.shape[-1]) @ turned, cpu)
    shares = shares.reshape(*outputs.shape[:3], *kernel.shape[:3])
    if shares.dtype.itemsize < 4:
        shares = shares.astype(jnp.float32)
    if stride == 1:
        return _sum_of_patches(shares, padding).astype(outputs.dtype)
    return _sum_of_strided_patches(shares, padding, stride, size).astype(outputs.dtype)


def _patches(x: Array, window: Sides, padding: int, stride: int) -> Array:
    """[B, H', W', kh kw I]: for each pixel of the outputs what the kernel sees, in its order."""
    margins = [(0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), margins)
    height, width = x.shape[1] - window[0] + 1, x.shape[2] - window[1] + 1
    shifted = [
        x[:, row : row + height : stride, column : column + width : stride]
        for row in range(window[0])
        for column in range(window[1])
    ]
    return jnp.concatenate(shifted, axis=-1)


def _sum_of_patches(shares: Array, padding: int) -> Array:
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


def _sum_of_strided_patches(shares: Array, padding: int, stride: int, size: Sides) -> Array:
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
