"""A convolutional network of series."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.conv import conv2d
from fedjax_het.nn.conv_products import ConvImpl
from fedjax_het.nn.layers import Linear, create_kernel_and_bias
from fedjax_het.nn.model import Model, Shape
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import require

KERNEL_SIZE = 5


class SeriesConv(nn.Module):
    """A convolution over the positions of a series, without padding.

    Attributes:
      features: number of output channels.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    features: int
    conv_impl: str

    @nn.compact
    def __call__(self, x):
        """Return `[B, T - 4, features]` for `x` `[B, T, F]`."""
        kernel_shape = (KERNEL_SIZE, 1, x.shape[-1], self.features)
        kernel, bias = create_kernel_and_bias(self, kernel_shape, glorot=False)
        return conv2d(x[:, :, None], kernel, 0, self.conv_impl)[:, :, 0] + bias


class Cnn1d(nn.Module):
    """The flax module of `cnn1d`.

    Attributes:
      num_classes: number of logits.
      width: filters of the first convolution; the second one has twice the number.
      hidden: width of the hidden layer.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    num_classes: int
    width: int
    hidden: int
    conv_impl: str

    @nn.compact
    def __call__(self, x, train):
        """Return features `[B, hidden]` and logits `[B, num_classes]` for series `[B, T, F]`."""
        for block in range(2):
            name = f"conv{block + 1}"
            x = jax.nn.relu(SeriesConv(self.width * 2**block, self.conv_impl, name=name)(x))
            length = x.shape[1] // 2 * 2
            x = jnp.maximum(x[:, :length:2], x[:, 1:length:2])
        x = x.reshape(x.shape[0], -1)
        features = jax.nn.relu(Linear(self.hidden, name="hidden")(x))
        return features, Linear(self.num_classes, name="head")(features)


def cnn1d(
    input_shape: Shape,
    num_classes: int,
    *,
    width: PositiveInt = 32,
    hidden: PositiveInt = 128,
    conv_impl: ConvImpl = "auto",
) -> Model:
    """Build a CNN of series: a convolution of size 5, ReLU and max pool, twice, and a hidden layer.

    Weights and biases are drawn as PyTorch does by default, U(±1/√fan_in).

    Args:
      input_shape: (T, F) with at least 16 positions.
      num_classes: number of logits.
      width: filters of the first convolution; the second one has twice the number.
      hidden: width of the hidden layer.
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The model.

    Raises:
      ConfigError: if series have fewer than 16 positions.
    """
    require(input_shape[0] >= 16, "input_shape", input_shape, "at least 16 positions for cnn1d")
    module = Cnn1d(num_classes, width, hidden, conv_impl)
    return make_flax_model(module, input_shape, can_shard_batch=True)
