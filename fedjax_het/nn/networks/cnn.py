"""FedAvg's CNN (McMahan et al., AISTATS 2017)."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.conv_products import ConvImpl
from fedjax_het.nn.layers import Conv, Linear, max_pool
from fedjax_het.nn.model import Model
from fedjax_het.utils.errors import require

FILTERS, HIDDEN = (32, 64), 512


class Cnn(nn.Module):
    """The flax module of `cnn`.

    Attributes:
      num_classes: number of logits.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    num_classes: int
    conv_impl: str

    @nn.compact
    def __call__(self, x, train):
        """Return features `[B, hidden]` and logits `[B, num_classes]` for images `[B, H, W, C]`."""
        x = apply_conv_blocks(x, FILTERS, self.conv_impl)
        x = jax.nn.relu(Linear(HIDDEN, name="hidden")(x.reshape(x.shape[0], -1)))
        return x, Linear(self.num_classes, name="head")(x)


def apply_conv_blocks(x: jax.Array, filters: Sequence[int], conv_impl: str) -> jax.Array:
    """Apply blocks of a 5x5 convolution without padding, a 2x2 max pool and ReLU.

    Args:
      x: images `[B, H, W, C]`.
      filters: number of filters of each block.
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The last block's output `[B, H', W', filters]`. The convolutions are the submodules `conv1`,
      `conv2`, ... of the module whose `__call__` runs.
    """
    for block, features in enumerate(filters):
        x = Conv(features, 5, 0, conv_impl, True, name=f"conv{block + 1}")(x)
        x = jax.nn.relu(max_pool(x))  # after the pool: equal, and a quarter of the numbers
    return x


def cnn(
    input_shape: tuple[int, int, int], num_classes: int, *, conv_impl: ConvImpl = "auto"
) -> Model:
    """Build FedAvg's CNN: 5x5 convolution, ReLU, 2x2 max pool, twice, and a hidden layer of 512.

    The network is PFLlib's, without padding: 32 and 64 filters of 5x5, each with ReLU and a 2x2 max
    pool, then a hidden layer of 512. It has 582,026 parameters for 28x28x1. Weights and biases are
    drawn as PyTorch does by default, U(±1/√fan_in).

    Args:
      input_shape: height, width (at least 16 pixels) and channels.
      num_classes: number of logits.
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The model.

    Raises:
      ConfigError: if images are smaller than 16x16.
    """
    require(min(input_shape[:2]) >= 16, "input_shape", input_shape, "at least 16x16 for cnn")
    return make_flax_model(Cnn(num_classes, conv_impl), input_shape, can_shard_batch=True)
