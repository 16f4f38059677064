"""VGG-11 (Simonyan and Zisserman, ICLR 2015), as federated learning uses it for small images."""

from typing import Literal

import flax.linen as nn
import jax

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.nn.conv_products import ConvImpl
from fedjax_het.nn.layers import NORMS, Conv, Linear, max_pool
from fedjax_het.nn.model import Model, count_cached_samples
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import require

# Filters of the convolutions in units of the width; a pool follows each block.
BLOCKS = ((1,), (2,), (4, 4), (8, 8), (8, 8))


class Vgg11(nn.Module):
    """The flax module of `vgg11`.

    Attributes:
      num_classes: number of logits.
      width: filters of the first convolution.
      norm: normalization, a key of `NORMS`.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    num_classes: int
    width: int
    norm: str
    conv_impl: str

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        """Return features `[B, F]` and logits `[B, num_classes]` of images `[B, H, W, C]`."""
        norm = NORMS[self.norm]
        for block, factors in enumerate(BLOCKS):
            for i, factor in enumerate(factors):
                name = f"block{block + 1}_conv{i + 1}"
                x = Conv(self.width * factor, 3, 1, self.conv_impl, add_bias=True, name=name)(x)
                if norm:
                    x = norm(name=f"{name}_norm")(x, train, batch_axis)
                x = jax.nn.relu(x)
            if min(x.shape[1:3]) > 1:
                x = max_pool(x)
        features = x.reshape(x.shape[0], -1)
        return features, Linear(self.num_classes, name="head")(features)


def vgg11(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    width: PositiveInt = 64,
    norm: Literal["group", "instance", "batch", "none"] = "none",
    conv_impl: ConvImpl = "auto",
) -> Model:
    """Build VGG-11 for small images: eight 3x3 convolutions in five blocks, and one linear layer.

    A 2x2 max pool follows each block. The two hidden layers of the ImageNet network are left out,
    as is usual for 32x32 images. The network has 9,225,610 parameters for 32x32x3 and 10 classes.
    Weights and biases are drawn as PyTorch does by default, U(±1/√fan_in).

    Args:
      input_shape: height, width (at least 16 pixels) and channels.
      num_classes: number of logits.
      width: filters of the first convolution; the last blocks have eight times the number.
      norm: "group" (GroupNorm with one channel per group), "instance" (identical to "group"),
        "batch" or "none".
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The model.

    Raises:
      ConfigError: if images are smaller than 16x16.
    """
    require(min(input_shape[:2]) >= 16, "input_shape", input_shape, "at least 16x16 for vgg11")
    height, image_width, _ = input_shape
    return make_flax_model(
        Vgg11(num_classes, width, norm, conv_impl),
        input_shape,
        cached_samples=count_cached_samples(height, image_width, width),
        can_shard_batch=True,
    )
