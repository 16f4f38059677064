"""ResNet-18 (He et al., CVPR 2016), with torchvision's layers and initialization."""

from typing import Literal

import flax.linen as nn
import jax

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.nn.conv_products import ConvImpl
from fedjax_het.nn.layers import BatchNorm, Linear, ResidualConv, max_pool_overlapping
from fedjax_het.nn.model import Model, count_cached_samples
from fedjax_het.utils.config import PositiveInt


class ResidualBlock(nn.Module):
    """A residual block: relu(x + two 3x3 convolutions of x).

    The shortcut is a 1x1 convolution if the block changes the size or the number of channels.

    Attributes:
      features: number of output channels.
      stride: stride of the first convolution in pixels.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    features: int
    stride: int
    conv_impl: str

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        """Return `[B, ceil(H / stride), ceil(W / stride), features]` for `x` `[B, H, W, C]`."""

        def apply_conv(x, name, kernel_size, stride):
            x = ResidualConv(self.features, kernel_size, stride, self.conv_impl, name=name)(x)
            return BatchNorm(name=f"{name}_norm")(x, train, batch_axis)

        y = jax.nn.relu(apply_conv(x, "conv1", 3, self.stride))
        y = apply_conv(y, "conv2", 3, 1)
        if self.stride > 1 or x.shape[-1] != self.features:
            x = apply_conv(x, "shortcut", 1, self.stride)
        return jax.nn.relu(x + y)


class ResNet18(nn.Module):
    """The flax module of `resnet18`.

    Attributes:
      num_classes: number of logits.
      width: filters of the first stage.
      stem: "imagenet" or "cifar".
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    num_classes: int
    width: int
    stem: str
    conv_impl: str

    @nn.compact
    def __call__(self, x, train, batch_axis: BatchAxis | None = None):
        """Return features `[B, 8 width]` and logits `[B, num_classes]` of images `[B, H, W, C]`."""
        kernel_size, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
        x = ResidualConv(self.width, kernel_size, stride, self.conv_impl, name="conv")(x)
        x = jax.nn.relu(BatchNorm(name="norm")(x, train, batch_axis))
        if self.stem == "imagenet":
            x = max_pool_overlapping(x)
        for stage in range(4):
            for block in range(2):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage{stage + 1}_block{block + 1}"
                features = self.width * 2**stage
                x = ResidualBlock(features, stride, self.conv_impl, name=name)(x, train, batch_axis)
        features = x.mean(axis=(1, 2))
        return features, Linear(self.num_classes, name="head")(features)


def resnet18(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    width: PositiveInt = 64,
    stem: Literal["imagenet", "cifar"] = "imagenet",
    conv_impl: ConvImpl = "auto",
) -> Model:
    """Build ResNet-18 with batch norm and a stem for large (imagenet) or small (cifar) images.

    Convolutions are drawn as torchvision does, N(0, 2/fan_out).

    Args:
      input_shape: height, width and channels.
      num_classes: number of logits.
      width: filters of the first stage; each of the three other stages doubles the number.
      stem: "imagenet" has a 7x7 convolution of stride 2 and a 3x3 max pool of stride 2. FedAF's
        Table 6 must have used it on 32x32 images, since it reports 11,181,642 parameters. "cifar"
        has a 3x3 convolution and no pool; 11,173,962 parameters.
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The model.
    """
    # Sides of the first stage, since the stem's activations are freed early.
    height, image_width = (-(-size // (4 if stem == "imagenet" else 1)) for size in input_shape[:2])
    return make_flax_model(
        ResNet18(num_classes, width, stem, conv_impl),
        input_shape,
        cached_samples=count_cached_samples(height, image_width, width),
        can_shard_batch=True,
    )
