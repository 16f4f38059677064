"""DynaFed's ConvNet."""

from typing import Literal

import flax.linen as nn
import jax

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.nn.conv_products import ConvImpl
from fedjax_het.nn.layers import NORMS, Conv, InstanceNorm, Linear, average_pool
from fedjax_het.nn.model import Model, count_cached_samples
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import require


class ConvNet(nn.Module):
    """The flax module of `convnet`.

    Attributes:
      num_classes: number of logits.
      width: output channels of each convolution.
      depth: number of blocks.
      norm: normalization, a key of `NORMS`.
      first_padding: padding of the first convolution in pixels.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    num_classes: int
    width: int
    depth: int
    norm: str
    first_padding: int
    conv_impl: str

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        """Return features `[B, F]` and logits `[B, num_classes]` for images `[B, H, W, C]`."""
        norm = NORMS[self.norm]
        for block in range(self.depth):
            padding = self.first_padding if block == 0 else 1
            # Instance normalization removes a constant per channel. Adding the bias would change
            # neither the output nor any gradient (its own is zero), but it stays a parameter. In
            # DynaFed's float32 code Adam turns the rounding of this gradient into steps.
            add_bias = norm is not InstanceNorm
            name = f"conv{block + 1}"
            x = Conv(self.width, 3, padding, self.conv_impl, add_bias, name=name)(x)
            if norm:
                x = norm(name=f"norm{block + 1}")(x, train, batch_axis)
            x = average_pool(jax.nn.relu(x))
        features = x.reshape(x.shape[0], -1)
        return features, Linear(self.num_classes, name="head")(features)


def convnet(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    width: PositiveInt = 128,
    depth: PositiveInt = 3,
    norm: Literal["group", "instance", "batch", "none"] = "group",
    conv_impl: ConvImpl = "auto",
) -> Model:
    """Build DynaFed's ConvNet: blocks of 3x3 convolution, normalization, ReLU and 2x2 average pool.

    The first convolution pads 28x28 images of one channel to give 32x32, as DynaFed's code does.
    The network has 317,706 parameters for 28x28x1 and 320,010 for 32x32x3. Weights and biases are
    drawn as PyTorch does by default, U(±1/√fan_in).

    Args:
      input_shape: height, width and channels.
      num_classes: number of logits.
      width: filters of each convolution.
      depth: number of blocks.
      norm: "group" (GroupNorm with one channel per group), "instance" (identical to "group"),
        "batch" or "none".
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The model.

    Raises:
      ConfigError: if images are too small for `depth` blocks, each of which halves them.
    """
    first_padding = 3 if input_shape == (28, 28, 1) else 1
    smallest = min(input_shape[:2]) + 2 * (first_padding - 1)
    max_depth = smallest.bit_length() - 1  # each block halves the image, rounding down
    expected = f"1 to {max_depth} for images of {input_shape}"
    require(1 <= depth <= max_depth, "depth", depth, expected)
    module = ConvNet(num_classes, width, depth, norm, first_padding, conv_impl)
    height, image_width = (size + 2 * (first_padding - 1) for size in input_shape[:2])
    # At least two samples: one sample makes the last block's matrix products too small.
    samples = count_cached_samples(height, image_width, width)
    return make_flax_model(
        module,
        input_shape,
        micro_batch=None if norm == "batch" else samples,  # batch norm mixes samples
        cached_samples=samples,
        can_shard_batch=True,
    )
