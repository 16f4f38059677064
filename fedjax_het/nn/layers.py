"""The layers of the package's networks, as flax modules."""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.nn.batch_axis import (
    BatchAxis,
    get_global_row_indices,
    get_num_shards,
    sum_over_shards,
)
from fedjax_het.nn.conv import conv2d

NORM_EPSILON = 1e-5
BATCH_NORM_MOMENTUM = 0.1  # weight of the new batch, PyTorch's convention


def uniform_fan_in(fan_in: int):
    """Return PyTorch's default initializer of linear and convolution layers: U(±1/√fan_in).

    Args:
      fan_in: number of inputs of each output.

    Returns:
      `(key, shape) -> array` for weights and biases.
    """
    bound = fan_in**-0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def create_kernel_and_bias(module: nn.Module, kernel_shape: tuple[int, ...], glorot: bool):
    """Create the parameters of a linear or convolution layer.

    Args:
      module: the flax module that owns the parameters.
      kernel_shape: shape of the kernel; the last axis is the outputs.
      glorot: True for Keras' initialization, kernels U(±√(6 / (fan_in + fan_out))) and biases of
        zero; False for PyTorch's, both U(±1/√fan_in).

    Returns:
      Kernel and bias.
    """
    if glorot:
        kernel_init, bias_init = nn.initializers.glorot_uniform(), nn.initializers.zeros
    else:
        kernel_init = bias_init = uniform_fan_in(math.prod(kernel_shape[:-1]))
    kernel = module.param("kernel", kernel_init, kernel_shape)
    return kernel, module.param("bias", bias_init, kernel_shape[-1:])


class Linear(nn.Module):
    """A fully connected layer.

    Attributes:
      features: number of outputs.
      glorot: whether to initialize as Keras does; otherwise as PyTorch does.
    """

    features: int
    glorot: bool = False

    @nn.compact
    def __call__(self, x):
        """Return `[B, features]` for `x` `[B, F]`."""
        kernel, bias = create_kernel_and_bias(self, (x.shape[-1], self.features), self.glorot)
        return x @ kernel + bias


def to_widths(hidden: Sequence[int] | int) -> tuple[int, ...]:
    """Return the widths of hidden layers as a tuple.

    Args:
      hidden: widths, or the width of one layer.

    Returns:
      The widths.
    """
    return (hidden,) if isinstance(hidden, int) else tuple(hidden)


def apply_hidden_layers(x: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    """Apply linear layers with ReLU, `hidden1` and so on, in the module that calls.

    Args:
      x: features `[B, F]`.
      widths: widths of the layers.

    Returns:
      Features `[B, widths[-1]]`; `x` if there are no layers.
    """
    for layer, width in enumerate(widths):
        x = jax.nn.relu(Linear(width, name=f"hidden{layer + 1}")(x))
    return x


class Embedding(nn.Module):
    """A vector for each token, drawn from N(0, 1) as PyTorch does.

    Attributes:
      num_tokens: number of different tokens.
      features: width of a vector.
    """

    num_tokens: int
    features: int

    @nn.compact
    def __call__(self, x):
        """Return `[B, T, features]` for tokens `x` `[B, T]`."""
        shape = (self.num_tokens, self.features)
        return self.param("embedding", nn.initializers.normal(1.0), shape)[x]


class Conv(nn.Module):
    """A convolution of stride 1 with square windows.

    Attributes:
      features: number of output channels.
      kernel_size: side of the window in pixels.
      padding: zeros on all sides in pixels.
      impl: implementation, see `conv2d`.
      add_bias: whether to add the bias; the parameter exists in any case.
      glorot: whether to initialize as Keras does; otherwise as PyTorch does.
    """

    features: int
    kernel_size: int
    padding: int
    impl: str
    add_bias: bool
    glorot: bool = False

    @nn.compact
    def __call__(self, x):
        """Return `[B, H', W', features]` for `x` `[B, H, W, C]`."""
        kernel_shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel, bias = create_kernel_and_bias(self, kernel_shape, self.glorot)
        x = conv2d(x, kernel, self.padding, self.impl)
        return x + bias if self.add_bias else x


class ResidualConv(nn.Module):
    """ResNet's convolution: no bias, padding that preserves the size for stride 1.

    Weights are N(0, 2 / fan_out), He's initialization as torchvision draws it.

    Attributes:
      features: number of output channels.
      kernel_size: side of the window in pixels.
      stride: distance of windows in pixels.
      impl: implementation, see `conv2d`.
    """

    features: int
    kernel_size: int
    stride: int
    impl: str

    @nn.compact
    def __call__(self, x):
        """Return `[B, ceil(H / stride), ceil(W / stride), features]` for `x` `[B, H, W, C]`."""
        deviation = (2 / (self.kernel_size**2 * self.features)) ** 0.5
        kernel_shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(deviation), kernel_shape)
        padding = self.kernel_size // 2
        return conv2d(x, kernel, padding, self.impl, self.stride)


def _to_float32(x):
    """Convert 16-bit floats to float32, the precision of statistics."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _cast_like(normalized, x):
    """Convert normalized values back to 16-bit floats if the input `x` has them."""
    return normalized.astype(x.dtype) if x.dtype.itemsize < 4 else normalized


class InstanceNorm(nn.Module):
    """Normalization of each channel of each sample over its pixels, then scale and shift."""

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        """Return `x` `[B, H, W, C]` normalized over the pixels of each sample and channel."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        shift = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        inputs, x = x, _to_float32(x)
        mean = x.mean(axis=(1, 2), keepdims=True)
        variance = jnp.square(x - mean).mean(axis=(1, 2), keepdims=True)
        factor = jax.lax.rsqrt(variance + NORM_EPSILON) * scale
        # One multiplication and one addition per pixel.
        return _cast_like(x * factor + (shift - mean * factor), inputs)


class BatchNorm(nn.Module):
    """Normalization of each channel over the batch and its pixels.

    Evaluation uses running statistics. As in PyTorch, the biased variance normalizes the batch, and
    the running variance averages the unbiased one, with weight `BATCH_NORM_MOMENTUM` for the new
    batch. Statistics cover the given batch alone and are never shared across mapped axes. If
    devices share the batch, statistics cover the parts of all devices. Samples that only fill up a
    batch are masked: they enter neither statistics nor gradients of other samples.

    Attributes:
      has_parameters: whether a scale and a shift of each channel follow the normalization.
    """

    has_parameters: bool = True

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None, mask=None):
        """Return `x` `[B, H, W, C]` normalized over the samples and pixels of each channel.

        `mask` is bool `[B, 1, 1, 1]`, true for the samples that statistics cover; None: all.
        """
        channels = (x.shape[-1],)
        if self.has_parameters:
            scale = self.param("scale", nn.initializers.ones, channels)
            shift = self.param("bias", nn.initializers.zeros, channels)
        running_mean = self.variable("state", "mean", jnp.zeros, channels)
        running_variance = self.variable("state", "variance", jnp.ones, channels)
        inputs, x = x, _to_float32(x)
        if train:
            num_shards, num_pixels = get_num_shards(batch_axis), x.shape[1] * x.shape[2]

            def compute_mean(values):
                """Return the mean of each channel, and the number of its values."""
                if mask is None:
                    count = num_shards * len(x) * num_pixels
                    if num_shards == 1:
                        return values.mean(axis=(0, 1, 2)), count
                    total = sum_over_shards(values.sum(axis=(0, 1, 2)), batch_axis)
                    return total / float(count), count  # more than 2**31 values are possible
                sums = values.sum(axis=(0, 1, 2), where=mask), mask.sum(dtype=x.dtype) * num_pixels
                total, count = sum_over_shards(sums, batch_axis)
                return total / jnp.maximum(count, 1), count

            mean, _ = compute_mean(x)
            variance, count = compute_mean(jnp.square(x - mean))
            if not self.is_initializing():
                divisor = max(count - 1, 1) if mask is None else jnp.maximum(count - 1, 1)
                unbiased = variance * (count / divisor)
                for running, new in ((running_mean, mean), (running_variance, unbiased)):
                    running.value += BATCH_NORM_MOMENTUM * (new - running.value)
        else:
            mean, variance = running_mean.value, running_variance.value
        factor = jax.lax.rsqrt(variance + NORM_EPSILON)
        if self.has_parameters:
            normalized = (x - mean) * (factor * scale) + shift
        else:
            normalized = (x - mean) * factor
        return _cast_like(normalized, inputs)


NORMS = {"group": InstanceNorm, "instance": InstanceNorm, "batch": BatchNorm, "none": None}


def average_pool(x):
    """Average over 2x2 windows; an odd last row or column is dropped.

    Args:
      x: `[B, H, W, C]`.

    Returns:
      `[B, H // 2, W // 2, C]`.
    """
    return sum(_take_corners(x)) * 0.25


@jax.custom_jvp
def max_pool(x):
    """Take the maximum over 2x2 windows; an odd last row or column is dropped.

    Equal maxima of a window share its gradient equally. The gradient compares `x` with the repeated
    maxima. This is up to three times as fast on a CPU as the derivative of the four strided slices.

    Args:
      x: `[B, H, W, C]`.

    Returns:
      `[B, H // 2, W // 2, C]`.
    """
    top_left, top_right, bottom_left, bottom_right = _take_corners(x)
    return jnp.maximum(jnp.maximum(top_left, top_right), jnp.maximum(bottom_left, bottom_right))


@max_pool.defjvp
def _differentiate_max_pool(primals, tangents):
    (x,), (tangent,) = primals, tangents
    maxima = max_pool(x)
    batch, height, width, channels = maxima.shape
    count = sum((corner == maxima).astype(x.dtype) for corner in _take_corners(x))
    # The barriers keep XLA from computing the repeated arrays anew for each strided number.
    rows, columns = 2 * height, 2 * width
    is_maximum = x[:, :rows, :columns] == jax.lax.optimization_barrier(upsample(maxima))
    chosen = jnp.where(is_maximum, tangent[:, :rows, :columns], 0)
    windows = (batch, height, 2, width, 2, channels)
    return maxima, jax.lax.optimization_barrier(chosen).reshape(windows).sum((2, 4)) / count


def upsample(x):
    """Repeat rows and columns.

    Args:
      x: `[B, H, W, C]`.

    Returns:
      `[B, 2 H, 2 W, C]`.
    """
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def _take_corners(x):
    """Return the four corners of the 2x2 windows of `[B, H, W, C]`, row by row."""
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    return [x[:, row:height:2, column:width:2] for row in (0, 1) for column in (0, 1)]


def max_pool_overlapping(x):
    """Take the maximum over 3x3 windows of stride 2 and padding 1.

    The maximum over rows comes first, then over columns: four maxima instead of eight.

    Args:
      x: `[B, H, W, C]`.

    Returns:
      `[B, ceil(H / 2), ceil(W / 2), C]`.
    """
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    height, width = x.shape[1] - 2, x.shape[2] - 2
    x = jnp.maximum(jnp.maximum(x[:, :height:2], x[:, 1 : height + 1 : 2]), x[:, 2::2])
    return jnp.maximum(jnp.maximum(x[:, :, :width:2], x[:, :, 1 : width + 1 : 2]), x[:, :, 2::2])


class Dropout(nn.Module):
    """Dropout: each value is zero with probability `rate`, and scaling preserves the mean.

    A sample's mask depends on the key and on the sample's row in the batch. It uses one random byte
    per value, so `rate` is rounded to 1/256. The bytes are drawn as 32-bit words and used as four
    quarters: this costs 0 to 2 % of a training step of `FslCnn`, while flax's 32 bits per value
    cost 2 to 10 %. Without a key, or in evaluation, nothing is dropped.

    Attributes:
      rate: probability of zero.
    """

    rate: float

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        """Return `x` `[B, ...]`, of which a fraction `rate` is 0 in training."""
        if not (train and self.has_rng("dropout")):
            return x
        flat = x.reshape(x.shape[0], -1)
        key, words = self.make_rng("dropout"), (-(-flat.shape[1] // 4),)
        rows = get_global_row_indices(x.shape[0], batch_axis)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
        bits = jax.vmap(lambda key: jax.random.bits(key, words))(keys)
        # The barrier keeps XLA from drawing the bits again in the backward pass.
        bits = jax.lax.optimization_barrier(bits)
        draws = jnp.concatenate([(bits >> shift) & 255 for shift in (0, 8, 16, 24)], axis=1)
        mask = draws[:, : flat.shape[1]] >= round(256 * self.rate)
        return jnp.where(mask, flat / (1 - self.rate), 0).reshape(x.shape)
