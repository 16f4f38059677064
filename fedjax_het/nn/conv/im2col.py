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


def compute_output(x: Array, kernel: Array, *, padding: int, stride: int) -> Array:
    """-> [B, H', W', O] of x [B, H, W, I] and kernel [kh, kw, I, O]."""
    height, width = kernel.shape[:2]
    patches = _extract_patches(x, (height, width), padding, stride)
    return patches @ kernel.reshape(-1, kernel.shape[-1])


def compute_kernel_gradient(
    x: Array, outputs: Array, *, window: Sides, padding: int, stride: int, cpu: bool
) -> Array:
    """-> [kh, kw, I, O], of x and of a cotangent of the outputs [B, H', W', O]."""
    patches = _extract_patches(x, window, padding, stride)
    columns, rows = (array.reshape(-1, array.shape[-1]) for array in (patches, outputs))
    if columns.shape[1] <= rows.shape[1]:  # the narrower of the two is the one to transpose
        kernel = _barrier(columns.T, cpu) @ rows
    else:
        kernel = _barrier(_barrier(rows.T, cpu) @ columns, cpu).T
    return kernel.reshape(*window, x.shape[-1], outputs.shape[-1])


def compute_input_gradient(
    outputs: Array, kernel: Array, *, size: Sides, padding: int, stride: int, cpu: bool
) -> Array:
    """-> [B, H, W, I], H and W being `size`, of a cotangent of the outputs and of the kernel."""
    kernel_matrix = _barrier(kernel.reshape(-1, kernel.shape[-1]).T, cpu)
    patch_gradients = _barrier(outputs.reshape(-1, kernel.shape[-1]) @ kernel_matrix, cpu)
    patch_gradients = patch_gradients.reshape(*outputs.shape[:3], *kernel.shape[:3])
    if patch_gradients.dtype.itemsize < 4:
        patch_gradients = patch_gradients.astype(jnp.float32)
    if stride == 1:
        return _fold_patches(patch_gradients, padding).astype(outputs.dtype)
    return _fold_strided_patches(patch_gradients, padding, stride, size).astype(outputs.dtype)


def _extract_patches(x: Array, window: Sides, padding: int, stride: int) -> Array:
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


def _fold_patches(patch_gradients: Array, padding: int) -> Array:
    """The transpose of `_patches`: add [B, H', W', kh, kw, I] up, where each was read."""
    batch, height, width, kernel_height, kernel_width, channels = patch_gradients.shape
    padded_shape = (batch, height + kernel_height - 1, width + kernel_width - 1, channels)
    total = jnp.zeros(padded_shape, patch_gradients.dtype)
    for row in range(kernel_height):
        for column in range(kernel_width):
            window = (slice(None), slice(row, row + height), slice(column, column + width))
            total = total.at[window].add(patch_gradients[:, :, :, row, column])
    bottom, right = total.shape[1] - padding, total.shape[2] - padding
    return total[:, padding:bottom, padding:right]


def _fold_strided_patches(patch_gradients: Array, padding: int, stride: int, size: Sides) -> Array:
    """The same where patches begin `stride` pixels apart in an input of `size` (height, width).

    Pixels whose rows and columns leave the same remainders share patches with each other alone:
    each such part of the input is a sum of patches of stride 1.
    """
    batch, *_, channels = patch_gradients.shape
    height, width = (-(-(pixels + 2 * padding) // stride) for pixels in size)

    def fold_phase(row, column):
        phase_gradients = patch_gradients[:, :, :, row::stride, column::stride]
        if phase_gradients.size == 0:  # a kernel smaller than its stride skips pixels
            return jnp.zeros((batch, height, width, channels), patch_gradients.dtype)
        total = _fold_patches(phase_gradients, 0)
        num_padding = (height - total.shape[1], width - total.shape[2])
        return jnp.pad(total, ((0, 0), (0, num_padding[0]), (0, num_padding[1]), (0, 0)))

    rows = [jnp.stack([fold_phase(r, c) for c in range(stride)], axis=3) for r in range(stride)]
    total = jnp.stack(rows, axis=2).reshape(batch, height * stride, width * stride, channels)
    return total[:, padding : padding + size[0], padding : padding + size[1]]
