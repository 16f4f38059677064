"""The three products of a convolution: its output and its two gradients.

Each product has a native form, the backend's convolution, and a form of matrix products of patches
(im2col). The choice between the two:

* GPU: native convolution for one kernel, matrix products for several kernels (lanes). Mapped over
  kernels, a native convolution becomes a grouped one, which GPU libraries compute slowly.
* TPU: native convolution. The compiler supports grouped convolutions. For matrix products it would
  pad the channels of patches to the width of the registers, which takes 1.5 times the memory.
* CPU: native convolution takes half the time of matrix products, whose patches must be written and
  read. Matrix products are faster for few channels, for windows of one pixel, for strides above 1
  and where most of the padding would be wasted. The native form supports only float32. Measured
  with 4 to 64 samples of 28x28 to 8x8 pixels, windows of 3x3 and 5x5, and 1 to 128 channels. The
  output of a layer with few features is a product of patches for several output pixels.

XLA's CPU library accepts a convolution with operands in its layout (samples, pixels, channels) and
a padding smaller than the window. Other convolutions, including those from `jax.grad`, run in a
loop that is 10 to 100 times slower. The functions `*_on_cpu` avoid such convolutions. Fast matrix
products on a CPU need plain row-major operands. XLA would fold a transposition into a product. The
barriers keep XLA from undoing either form. On other platforms products accept any layout, and
barriers would prevent fusion with the surrounding operations.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.nn.micro_batch import accumulate_micro_batches
from fedjax_het.utils.arrays import pad_rows

ConvImpl = Literal["auto", "native", "im2col", "unrolled"]
AUTO, NATIVE, IM2COL, UNROLLED = CONV_IMPLS = get_args(ConvImpl)

# Maximum input pixels per output pixel for the native input gradient on a CPU; above, the time for
# padding exceeds the gain.
MAX_PADDING_RATIO = 1.4
MIN_WIDE_FEATURES = 32  # features that fill the registers of a CPU in a product of patches
BLOCK_COLUMNS = 4  # adjacent output pixels of one patch in `_blocked_output_on_cpu`
CACHED_PIXELS = 4096  # output pixels per channel that one piece of the kernel gradient reads

Sides = tuple[int, int]  # height, width

barrier = jax.lax.optimization_barrier


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
    is_native_faster = features >= MIN_WIDE_FEATURES or channels * features >= 128
    if _is_native(convolution, x, cpu=cpu, is_native_faster=is_native_faster):
        return (_native_output_on_cpu if cpu else _native_output)(convolution, x, kernel)
    has_few_features = features < MIN_WIDE_FEATURES and convolution.window[1] > 1
    if cpu and has_few_features and convolution.stride == 1:
        return _blocked_output_on_cpu(convolution, x, kernel)
    return _extract_patches(convolution, x) @ kernel.reshape(-1, features)


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
    shape = (*convolution.window, x.shape[-1], outputs.shape[-1])
    has_unit_stride = convolution.stride == 1
    if not _is_native(convolution, x, cpu=cpu, is_native_faster=has_unit_stride):
        patches = _extract_patches(convolution, x)
        patches, outputs = (array.reshape(-1, array.shape[-1]) for array in (patches, outputs))
        # Transposing the narrower matrix is cheaper.
        if patches.shape[1] <= outputs.shape[1]:
            kernel = _barrier_on_cpu(patches.T, cpu) @ outputs
        else:
            kernel = _barrier_on_cpu(_barrier_on_cpu(outputs.T, cpu) @ patches, cpu).T
        return kernel.reshape(shape)
    if cpu and has_unit_stride:
        return _native_kernel_gradient_on_cpu(convolution, x, outputs)
    kernel_type = jax.ShapeDtypeStruct(shape, x.dtype)
    transpose = jax.linear_transpose(lambda k: _native_output(convolution, x, k), kernel_type)
    return transpose(outputs)[0]


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
    size, padding = convolution.size, convolution.padding
    is_plain_convolution = convolution.stride == 1 and padding < min(convolution.window)
    max_pixels = MAX_PADDING_RATIO * math.prod(convolution.output_size)
    has_little_padding = math.prod(size) <= max_pixels
    is_native_faster = (
        is_plain_convolution and has_little_padding and channels > 1 and channels * features >= 96
    )
    if not _is_native(convolution, outputs, cpu=cpu, is_native_faster=is_native_faster):
        return _im2col_input_gradient(convolution, outputs, kernel, cpu=cpu)
    if cpu and is_plain_convolution:
        # The gradient is a convolution of the cotangent with the flipped kernel.
        flipped_kernel = barrier(kernel[::-1, ::-1].swapaxes(2, 3))
        return _convolve(outputs, flipped_kernel, [side - 1 - padding for side in kernel.shape[:2]])
    x_type = jax.ShapeDtypeStruct((len(outputs), *size, channels), outputs.dtype)
    return jax.linear_transpose(lambda x: _native_output(convolution, x, kernel), x_type)(outputs)[
        0
    ]


def _is_native(
    convolution: Convolution, array: Array, *, cpu: bool, is_native_faster: bool
) -> bool:
    """Return whether to use the native form; on a CPU the dtype of `array`, an operand, matters."""
    if convolution.impl != AUTO or not cpu:
        return convolution.impl != IM2COL
    return is_native_faster and max(convolution.window) > 1 and array.dtype == jnp.float32


def _convolve(x: Array, kernel: Array, padding: Sequence[int], stride: int = 1) -> Array:
    """Call the backend's convolution; `padding` applies to height and width."""
    margins = [(side, side) for side in padding]
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _native_output(convolution: Convolution, x: Array, kernel: Array) -> Array:
    return _convolve(x, kernel, [convolution.padding] * 2, convolution.stride)


def _native_output_on_cpu(convolution: Convolution, x: Array, kernel: Array) -> Array:
    """Pad images before the convolution, and channels to a multiple of four, which is faster."""
    channels, padding = x.shape[-1], convolution.padding
    num_padding_channels = -channels % 4 if channels > 1 else 0
    if num_padding_channels or padding >= min(kernel.shape[:2]):
        x, padding = barrier(_pad_images(x, padding, num_padding_channels)), 0
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, num_padding_channels), (0, 0)))
    return _convolve(x, kernel, [padding] * 2, convolution.stride)


def _blocked_output_on_cpu(convolution: Convolution, x: Array, kernel: Array) -> Array:
    """Compute several adjacent output columns from one patch, for few features and stride 1.

    A patch is as wide as the windows of `BLOCK_COLUMNS` adjacent output pixels. The matrix has the
    kernel once for each of them, shifted by a column and filled up with zeros. For windows of 5x5,
    a pixel needs 1.6 times the multiply-adds, but 0.4 times the numbers of patches. The products
    have 4 times the columns. With 6 or 16 features this is 2 to 8 times as fast as plain patches.
    """
    window_height, window_width, channels, features = kernel.shape
    height, width = convolution.output_size
    block = min(BLOCK_COLUMNS, width)
    patch_width, num_blocks = block + window_width - 1, -(-width // block)
    x = _pad_images(x, convolution.padding)
    num_missing = num_blocks * block + window_width - 1 - x.shape[2]
    rows = jnp.pad(x, ((0, 0), (0, 0), (0, num_missing), (0, 0))).reshape(*x.shape[:2], -1)
    starts = [channels * block * i for i in range(num_blocks)]
    patches = [
        jnp.concatenate(
            [
                rows[:, row : row + height, start : start + channels * patch_width]
                for row in range(window_height)
            ],
            axis=-1,
        )
        for start in starts
    ]
    shifted_kernels = [
        jnp.pad(kernel, ((0, 0), (shift, block - 1 - shift), (0, 0), (0, 0)))
        for shift in range(block)
    ]
    matrix = jnp.stack(shifted_kernels, axis=3).reshape(-1, block * features)
    outputs = barrier(jnp.stack(patches, axis=2)) @ barrier(matrix)
    return outputs.reshape(len(x), height, num_blocks * block, features)[:, :, :width]


def _native_kernel_gradient_on_cpu(convolution: Convolution, x: Array, outputs: Array) -> Array:
    """Compute the kernel gradient of a convolution of stride 1 as a convolution.

    Each number of the kernel gradient is the inner product of a shifted input channel with a
    channel of the outputs' cotangent. This is a convolution of images with samples as channels,
    whose kernel is the cotangent. Samples are padded to a multiple of four, which the library
    requires for speed.
    """

    def compute_piece(samples: tuple[Array, Array]) -> tuple[Array, tuple[()]]:
        x, outputs = barrier(samples)
        num_padding = -len(x) % 4
        images = pad_rows(_pad_images(x, convolution.padding), num_padding)
        images = barrier(images.transpose(3, 1, 2, 0))
        kernel = barrier(pad_rows(outputs, num_padding).transpose(1, 2, 0, 3))
        return _convolve(images, kernel, (0, 0)).transpose(1, 2, 0, 3), ()

    pixels = outputs.shape[1] * outputs.shape[2]
    chunk_size = max(4, CACHED_PIXELS // pixels // 4 * 4)
    return accumulate_micro_batches(compute_piece, (x, outputs), micro_batch=chunk_size)[0]


def _pad_images(x: Array, padding: int, num_padding_channels: int = 0) -> Array:
    """Add zeros around images and after the last channel."""
    sides = (padding, padding, 0)
    margins = [(0, 0, 0), sides, sides, (0, num_padding_channels, 0)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), margins)


def _barrier_on_cpu(array: Array, cpu: bool) -> Array:
    """Keep XLA from merging operations before and after `array`, on a CPU."""
    return barrier(array) if cpu else array


def _extract_patches(convolution: Convolution, x: Array) -> Array:
    """Return the window of each output pixel, `[B, H', W', kh kw I]`, in the kernel's order."""
    x = _pad_images(x, convolution.padding)
    window, stride = convolution.window, convolution.stride
    height, width = x.shape[1] - window[0] + 1, x.shape[2] - window[1] + 1
    shifted = [
        x[:, row : row + height : stride, column : column + width : stride]
        for row in range(window[0])
        for column in range(window[1])
    ]
    return jnp.concatenate(shifted, axis=-1)


def _im2col_input_gradient(
    convolution: Convolution, outputs: Array, kernel: Array, *, cpu: bool
) -> Array:
    """Compute the input gradient by matrix products; 16-bit floats are summed in 32 bits."""
    kernel_matrix = _barrier_on_cpu(kernel.reshape(-1, kernel.shape[-1]).T, cpu)
    patch_gradients = outputs.reshape(-1, kernel.shape[-1]) @ kernel_matrix
    patch_gradients = _barrier_on_cpu(patch_gradients, cpu)
    patch_gradients = patch_gradients.reshape(*outputs.shape[:3], *kernel.shape[:3])
    if patch_gradients.dtype.itemsize < 4:
        patch_gradients = patch_gradients.astype(jnp.float32)
    if convolution.stride == 1:
        padded = _fold_patches(patch_gradients)
    else:
        padded = _fold_strided_patches(convolution, patch_gradients)
    (height, width), padding = convolution.size, convolution.padding
    return padded[:, padding : padding + height, padding : padding + width].astype(outputs.dtype)


def _fold_patches(patch_gradients: Array) -> Array:
    """Add patches `[B, H', W', kh, kw, I]` at their positions; transpose of `_extract_patches`."""
    batch, height, width, kernel_height, kernel_width, channels = patch_gradients.shape
    padded_shape = (batch, height + kernel_height - 1, width + kernel_width - 1, channels)
    total = jnp.zeros(padded_shape, patch_gradients.dtype)
    for row in range(kernel_height):
        for column in range(kernel_width):
            window = (slice(None), slice(row, row + height), slice(column, column + width))
            total = total.at[window].add(patch_gradients[:, :, :, row, column])
    return total


def _fold_strided_patches(convolution: Convolution, patch_gradients: Array) -> Array:
    """Add patches that start `stride` pixels apart.

    Pixels with equal remainders of row and column modulo the stride share patches only with each
    other. Each such subset of the input is therefore a sum of patches of stride 1.
    """
    batch, *_, channels = patch_gradients.shape
    stride, padding = convolution.stride, convolution.padding
    height, width = (-(-(pixels + 2 * padding) // stride) for pixels in convolution.size)

    def fold_phase(row, column):
        phase_gradients = patch_gradients[:, :, :, row::stride, column::stride]
        if phase_gradients.size == 0:  # a kernel smaller than its stride skips pixels
            return jnp.zeros((batch, height, width, channels), patch_gradients.dtype)
        total = _fold_patches(phase_gradients)
        num_padding = (height - total.shape[1], width - total.shape[2])
        return jnp.pad(total, ((0, 0), (0, num_padding[0]), (0, num_padding[1]), (0, 0)))

    rows = [
        jnp.stack([fold_phase(row, column) for column in range(stride)], axis=3)
        for row in range(stride)
    ]
    return jnp.stack(rows, axis=2).reshape(batch, height * stride, width * stride, channels)
