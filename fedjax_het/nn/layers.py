"""The layers of the package's networks, as flax modules."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.nn.batch_axis import (
    BatchAxis,
    get_global_row_indices,
    get_num_shards,
    sum_over_shards,
)
from fedjax_het.nn.conv.primitive import conv2d

NORM_EPSILON = 1e-5
BATCH_NORM_MOMENTUM = 0.1  # weight of the new batch, as PyTorch counts it


def uniform_fan_in(fan_in: int):
    """PyTorch's default for weights and biases of linear and convolution layers: U(±1/√fan_in)."""
    bound = fan_in**-0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def create_kernel_and_bias(module: nn.Module, kernel_shape: tuple[int, ...], glorot: bool):
    """The parameters of a linear or convolution layer, drawn as PyTorch or (glorot) Keras does.

    Glorot's are U(±√(6 / (fan_in + fan_out))), with biases of zero.
    """
    if glorot:
        kernel_init, bias_init = nn.initializers.glorot_uniform(), nn.initializers.zeros
    else:
        kernel_init = bias_init = uniform_fan_in(math.prod(kernel_shape[:-1]))
    kernel = module.param("kernel", kernel_init, kernel_shape)
    return kernel, module.param("bias", bias_init, kernel_shape[-1:])


class Linear(nn.Module):
    features: int
    glorot: bool = False

    @nn.compact
    def __call__(self, x):
        kernel, bias = create_kernel_and_bias(self, (x.shape[-1], self.features), self.glorot)
        return x @ kernel + bias


class Conv(nn.Module):
    features: int
    kernel_size: int
    padding: int
    impl: str
    add_bias: bool
    glorot: bool = False

    @nn.compact
    def __call__(self, x):
        kernel_shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel, bias = create_kernel_and_bias(self, kernel_shape, self.glorot)
        x = conv2d(x, kernel, self.padding, self.impl)
        return x + bias if self.add_bias else x


class ResidualConv(nn.Module):
    """ResNet's: no bias, padding that keeps the size (but for the stride), He's initialisation.

    Weights are N(0, 2 / fan_out), as torchvision draws them.
    """

    features: int
    kernel_size: int
    stride: int
    impl: str

    @nn.compact
    def __call__(self, x):
        deviation = (2 / (self.kernel_size**2 * self.features)) ** 0.5
        kernel_shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(deviation), kernel_shape)
        padding = self.kernel_size // 2
        return conv2d(x, kernel, padding, self.impl, self.stride)


def _to_float32(x):
    """Numbers as statistics are taken of them."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _cast_like(normalized, x):
    return normalized.astype(x.dtype) if x.dtype.itemsize < 4 else normalized


class InstanceNorm(nn.Module):
    """Normalise each channel of each sample over its pixels, then scale and shift."""

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        shift = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        inputs, x = x, _to_float32(x)
        mean = x.mean(axis=(1, 2), keepdims=True)
        variance = jnp.square(x - mean).mean(axis=(1, 2), keepdims=True)
        factor = jax.lax.rsqrt(variance + NORM_EPSILON) * scale
        # One multiplication and addition a pixel.
        return _cast_like(x * factor + (shift - mean * factor), inputs)


class BatchNorm(nn.Module):
    """Normalise each channel over the batch and its pixels; running statistics for evaluation.

    As in PyTorch the batch is normalised by its biased variance and the running variance averages
    the unbiased one. Statistics are of the given batch alone, never shared across mapped axes, and
    of the whole batch where devices share it (`batch_axis`).
    """

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        channels = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, channels)
        shift = self.param("bias", nn.initializers.zeros, channels)
        running_mean = self.variable("state", "mean", jnp.zeros, channels)
        running_variance = self.variable("state", "variance", jnp.ones, channels)
        inputs, x = x, _to_float32(x)
        if train:
            num_shards = get_num_shards(batch_axis)
            count = num_shards * (x.size // x.shape[-1])

            def compute_mean(values):
                if num_shards == 1:
                    return values.mean(axis=(0, 1, 2))
                return sum_over_shards(values.sum(axis=(0, 1, 2)), batch_axis) / count

            mean = compute_mean(x)
            variance = compute_mean(jnp.square(x - mean))
            if not self.is_initializing():
                unbiased = variance * (count / max(count - 1, 1))
                for running, new in ((running_mean, mean), (running_variance, unbiased)):
                    running.value += BATCH_NORM_MOMENTUM * (new - running.value)
        else:
            mean, variance = running_mean.value, running_variance.value
        normalized = (x - mean) * (jax.lax.rsqrt(variance + NORM_EPSILON) * scale) + shift
        return _cast_like(normalized, inputs)


NORMS = {"group": InstanceNorm, "instance": InstanceNorm, "batch": BatchNorm, "none": None}


def average_pool(x):
    """Mean over 2x2 windows; an odd last row or column is dropped."""
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    corners = [x[:, row:height:2, column:width:2] for row in (0, 1) for column in (0, 1)]
    return sum(corners) * 0.25


def max_pool(x):
    """Maximum over 2x2 windows; an odd last row or column is dropped."""
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    corners = [x[:, row:height:2, column:width:2] for row in (0, 1) for column in (0, 1)]
    return jnp.maximum(jnp.maximum(corners[0], corners[1]), jnp.maximum(corners[2], corners[3]))


def max_pool_overlapping(x):
    """Maximum over 3x3 windows two pixels apart, which reach a pixel beyond each edge.

    Rows first, then columns: four maxima instead of eight.
    """
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    height, width = x.shape[1] - 2, x.shape[2] - 2
    x = jnp.maximum(jnp.maximum(x[:, :height:2], x[:, 1 : height + 1 : 2]), x[:, 2::2])
    return jnp.maximum(jnp.maximum(x[:, :, :width:2], x[:, :, 1 : width + 1 : 2]), x[:, :, 2::2])


class Dropout(nn.Module):
    """Numbers are zero with probability `rate`, the others grow so that the mean is kept.

    A sample's mask depends on the key and on its row in the batch, a byte a number: `rate` is
    rounded to 1/256. Drawn and used as four quarters it costs 0 to 2 % of a training step of
    `FslCnn`, where 32 bits a number, as flax has it, cost 2 to 10 %. Without a key, or in
    evaluation, nothing is dropped.
    """

    rate: float

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        if not (train and self.has_rng("dropout")):
            return x
        flat = x.reshape(x.shape[0], -1)
        key, words = self.make_rng("dropout"), (-(-flat.shape[1] // 4),)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(
            get_global_row_indices(x.shape[0], batch_axis)
        )
        bits = jax.vmap(lambda key: jax.random.bits(key, words))(keys)
        bits = jax.lax.optimization_barrier(bits)  # or they are drawn again in the backward pass
        draws = jnp.concatenate([(bits >> shift) & 255 for shift in (0, 8, 16, 24)], axis=1)
        mask = draws[:, : flat.shape[1]] >= round(256 * self.rate)
        return jnp.where(mask, flat / (1 - self.rate), 0).reshape(x.shape)
