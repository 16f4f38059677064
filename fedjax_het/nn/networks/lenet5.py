"""LeNet-5 with ReLU and max pools, the network of NIID-Bench (Li et al., ICDE 2022)."""

import flax.linen as nn

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.conv_products import ConvImpl
from fedjax_het.nn.layers import Linear, apply_hidden_layers
from fedjax_het.nn.model import Model
from fedjax_het.nn.networks.cnn import apply_conv_blocks
from fedjax_het.utils.errors import require

FILTERS, HIDDEN = (6, 16), (120, 84)


class LeNet5(nn.Module):
    """The flax module of `lenet5`.

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
        x = apply_hidden_layers(x.reshape(x.shape[0], -1), HIDDEN)
        return x, Linear(self.num_classes, name="head")(x)


def lenet5(
    input_shape: tuple[int, int, int], num_classes: int, *, conv_impl: ConvImpl = "auto"
) -> Model:
    """Build NIID-Bench's `simple-cnn`: LeNet-5 with ReLU and max pools.

    Two blocks of a 5x5 convolution without padding (6 and 16 filters), ReLU and a 2x2 max pool
    precede hidden layers of 120 and 84. The network has 44,426 parameters for 28x28x1 and 62,006
    for 32x32x3. Weights and biases are drawn as PyTorch does by default, U(±1/√fan_in).

    Args:
      input_shape: height, width (at least 16 pixels) and channels.
      num_classes: number of logits.
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The model.

    Raises:
      ConfigError: if images are smaller than 16x16.
    """
    require(min(input_shape[:2]) >= 16, "input_shape", input_shape, "at least 16x16 for lenet5")
    return make_flax_model(LeNet5(num_classes, conv_impl), input_shape, can_shard_batch=True)
