"""ResNet-8 with group norm, a small residual network for CIFAR-10 (He et al., CVPR 2016)."""

import flax.linen as nn
import jax

from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.conv_products import ConvImpl
from fedjax_het.nn.layers import Linear, ResidualConv
from fedjax_het.nn.model import Model, count_cached_samples
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import require

NUM_STAGES = 3


class GroupNormConv(nn.Module):
    """A convolution without bias, and group norm.

    Attributes:
      features: number of output channels.
      kernel_size: side of the window in pixels.
      stride: stride of the convolution in pixels.
      groups: number of groups of the norm.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    features: int
    kernel_size: int
    stride: int
    groups: int
    conv_impl: str

    @nn.compact
    def __call__(self, x):
        """Return `[B, ceil(H / stride), ceil(W / stride), features]` for `x` `[B, H, W, C]`."""
        x = ResidualConv(self.features, self.kernel_size, self.stride, self.conv_impl, name="conv")(
            x
        )
        return nn.GroupNorm(self.groups, epsilon=1e-5, name="norm")(x)


class ResNet8(nn.Module):
    """The flax module of `resnet8`.

    Attributes:
      num_classes: number of logits.
      width: filters of the first stage.
      groups: number of groups of each group norm.
      conv_impl: implementation of convolutions, see `conv2d`.
    """

    num_classes: int
    width: int
    groups: int
    conv_impl: str

    @nn.compact
    def __call__(self, x, train):
        """Return features `[B, 4 width]` and logits `[B, num_classes]` of images `[B, H, W, C]`."""

        def apply_conv(x, features, kernel_size, stride, name):
            layer = GroupNormConv(
                features, kernel_size, stride, self.groups, self.conv_impl, name=name
            )
            return layer(x)

        x = jax.nn.relu(apply_conv(x, self.width, 3, 1, "stem"))
        for stage in range(NUM_STAGES):
            features, stride, name = self.width * 2**stage, 1 + (stage > 0), f"stage{stage + 1}"
            y = jax.nn.relu(apply_conv(x, features, 3, stride, f"{name}_conv1"))
            y = apply_conv(y, features, 3, 1, f"{name}_conv2")
            if stage > 0:
                x = apply_conv(x, features, 1, stride, f"{name}_shortcut")
            x = jax.nn.relu(x + y)
        features = x.mean(axis=(1, 2))
        return features, Linear(self.num_classes, name="head")(features)


def resnet8(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    width: PositiveInt = 16,
    groups: PositiveInt = 2,
    conv_impl: ConvImpl = "auto",
) -> Model:
    """Build ResNet-8 with group norm: three stages of one residual block.

    The network has 78,042 parameters for 32x32x3 and 10 classes. Convolutions are drawn as
    torchvision does, N(0, 2/fan_out).

    Args:
      input_shape: height, width and channels.
      num_classes: number of logits.
      width: filters of the first stage; each of the two other stages doubles the number.
      groups: number of groups of each group norm, which divides `width`.
      conv_impl: implementation of convolutions, see `conv2d`.

    Returns:
      The model.

    Raises:
      ConfigError: if `groups` does not divide `width`.
    """
    require(width % groups == 0, "groups", groups, f"a divisor of width = {width}")
    height, image_width, _ = input_shape
    samples = count_cached_samples(height, image_width, width)
    module = ResNet8(num_classes, width, groups, conv_impl)
    return make_flax_model(
        *(module, input_shape), micro_batch=samples, cached_samples=samples, can_shard_batch=True
    )
