"""A convolution and its two gradients as matrix products of patches (im2col).

On a CPU, fast matrix products need plain row-major operands. XLA would fold a transposition into a
product, which prevents this; the barriers keep it separate. On other platforms products accept any
layout, and barriers would prevent fusion with the surrounding operations.

The input gradient of 16-bit floats is summed in 32 bits.
"""

import jax
import jax.numpy as jnp
from jax import Array

Sides = tuple[int, int]  # height, width


def _barrier(array: Array, cpu: bool) -> Array:
    """Keep XLA from merging operations before and after `array`, on a CPU."""
    return jax.lax.optimization_barrier(array) if cpu else array


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
    height, width = kernel.shape[:2]
    patches = _extract_patches(x, (height, width), padding, stride)
    return patches @ kernel.reshape(-1, kernel.shape[-1])


def compute_kernel_gradient(
    x: Array, outputs: Array, *, window: Sides, padding: int, stride: int, cpu: bool
) -> Array:
    """Compute the gradient with respect to the kernel.

    Args:
      x: input, `[B, H, W, I]`.
      outputs: cotangent of the output, `[B, H', W', O]`.
      window: height and width of the kernel, kh and kw.
      padding: zeros on all sides in pixels.
      stride: distance of windows in pixels.
      cpu: whether to use the form for CPUs.

    Returns:
      `[kh, kw, I, O]`.
    """
    patches = _extract_patches(x, window, padding, stride)
    patch_matrix, output_matrix = (
        array.reshape(-1, array.shape[-1]) for array in (patches, outputs)
    )
    if (
        patch_matrix.shape[1] <= output_matrix.shape[1]
    ):  # transposing the narrower matrix is cheaper
        kernel = _barrier(patch_matrix.T, cpu) @ output_matrix
    else:
        kernel = _barrier(_barrier(output_matrix.T, cpu) @ patch_matrix, cpu).T
    return kernel.reshape(*window, x.shape[-1], outputs.shape[-1])


def compute_input_gradient(
    outputs: Array, kernel: Array, *, size: Sides, padding: int, stride: int, cpu: bool
) -> Array:
    """Compute the gradient with respect to the input.

    Args:
      outputs: cotangent of the output, `[B, H', W', O]`.
      kernel: `[kh, kw, I, O]`.
      size: height and width of the input, H and W.
      padding: zeros on all sides in pixels.
      stride: distance of windows in pixels.
      cpu: whether to use the form for CPUs.

    Returns:
      `[B, H, W, I]`.
    """
    kernel_matrix = _barrier(kernel.reshape(-1, kernel.shape[-1]).T, cpu)
    patch_gradients = _barrier(outputs.reshape(-1, kernel.shape[-1]) @ kernel_matrix, cpu)
    patch_gradients = patch_gradients.reshape(*outputs.shape[:3], *kernel.shape[:3])
    if patch_gradients.dtype.itemsize < 4:
        patch_gradients = patch_gradients.astype(jnp.float32)
    if stride == 1:
        return _fold_patches(patch_gradients, padding).astype(outputs.dtype)
    return _fold_strided_patches(patch_gradients, padding, stride, size).astype(outputs.dtype)


def _extract_patches(x: Array, window: Sides, padding: int, stride: int) -> Array:
    """Return the window of each output pixel, `[B, H', W', kh kw I]`, in the kernel's order."""
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
    """Add patches `[B, H', W', kh, kw, I]` at their positions; transpose of `_extract_patches`."""
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
    """Add patches that start `stride` pixels apart, for an input of `size` (height, width).

    Pixels with equal remainders of row and column modulo the stride share patches only with each
    other. Each such subset of the input is therefore a sum of patches of stride 1.
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

    rows = [
        jnp.stack([fold_phase(row, column) for column in range(stride)], axis=3)
        for row in range(stride)
    ]
    total = jnp.stack(rows, axis=2).reshape(batch, height * stride, width * stride, channels)
    return total[:, padding : padding + size[0], padding : padding + size[1]]
