"""Generators of features and of images from noise and a label."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.nn.batch_axis import BatchAxis, gather_rows, sum_over_shards
from fedjax_het.nn.layers import BatchNorm, Conv, Linear, upsample
from fedjax_het.nn.model import Variables


class Generator(NamedTuple):
    """A generator of features or images as pure functions.

    Attributes:
      noise_size: length of the noise vectors, Z.
      init: `init(key) -> Variables`.
      apply: `apply(variables, noise [B, Z], labels [B], *, train, batch_axis=None) -> (outputs
        [B, ...], new_state)`. `batch_axis`: the devices that share the batch.
        `new_state` is `variables["state"]`; if `train` is true, its running statistics include the
        batch.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.nn import make_generator
      >>> generator = make_generator(num_classes=3, num_features=5, hidden=4, noise_size=2)
      >>> variables = generator.init(jax.random.key(0))
      >>> noise, labels = jnp.zeros((6, generator.noise_size)), jnp.zeros(6, jnp.int32)
      >>> features, state = generator.apply(variables, noise, labels, train=False)
      >>> features.shape
      (6, 5)
    """

    noise_size: int
    init: Callable[[jax.Array], Variables]
    apply: Callable


class FeatureGenerator(nn.Module):
    """The flax module of `make_generator`, which returns the features alone.

    Attributes:
      num_classes: number of labels.
      num_features: length of the features, F.
      hidden: width of the hidden layer.
    """

    num_classes: int
    num_features: int
    hidden: int

    @nn.compact
    def __call__(self, noise, labels, train, batch_axis: BatchAxis | None = None):
        """Return features `[B, num_features]` for noise `[B, noise_size]` and labels `[B]`."""
        x = jnp.concatenate([noise, jax.nn.one_hot(labels, self.num_classes)], axis=1)
        x = Linear(self.hidden, name="hidden")(x)
        x = x[:, None, None]  # BatchNorm reads images: one pixel each
        x = BatchNorm(name="norm")(x, train, batch_axis)[:, 0, 0]
        return Linear(self.num_features, name="features")(jax.nn.relu(x))


class ImageGenerator(nn.Module):
    """The flax module of `make_image_generator`, which returns the images alone.

    Attributes:
      num_classes: number of labels.
      image_shape: height, width and channels of an image.
      width: output channels of the last hidden convolution.
    """

    num_classes: int
    image_shape: tuple[int, ...]
    width: int

    @nn.compact
    def __call__(self, noise, labels, train, batch_axis: BatchAxis | None = None):
        """Return images `[B, H, W, C]` for noise `[B, noise_size]` and labels `[B]`."""
        height, width, channels = self.image_shape
        map_shape = (-(-height // 4), -(-width // 4), self.width)
        size = map_shape[0] * map_shape[1] * map_shape[2]
        inputs = {"noise": noise, "label": jax.nn.one_hot(labels, self.num_classes)}
        maps = [
            Linear(size, name=name)(x).reshape(len(x), *map_shape) for name, x in inputs.items()
        ]
        x = BatchNorm(name="norm1")(jnp.concatenate(maps, axis=-1), train, batch_axis)
        for block, features in ((2, 2 * self.width), (3, self.width)):
            # Batch norm removes the bias: its gradient would be rounding, which Adam scales up.
            x = Conv(features, 3, 1, "auto", add_bias=False, name=f"conv{block}")(upsample(x))
            x = BatchNorm(name=f"norm{block}")(x, train, batch_axis)
            x = jax.nn.leaky_relu(x, 0.2)
        x = Conv(channels, 3, 1, "auto", add_bias=True, name="images")(x)
        x = jnp.tanh(x[:, :height, :width])
        return BatchNorm(has_parameters=False, name="norm4")(x, train, batch_axis)


def make_generator(num_classes: int, num_features: int, hidden: int, noise_size: int) -> Generator:
    """Build FedGen's generator.

    Layers: [noise, one-hot label] -> linear, `hidden` -> batch norm -> ReLU -> linear,
    `num_features`. The output has no activation, as in FedGen's public code (zhuangdizhu/FedGen).
    Weights are drawn as PyTorch does by default, U(±1/√fan_in).

    Args:
      num_classes: number of labels.
      num_features: length of the features, F.
      hidden: width of the hidden layer.
      noise_size: length of the noise vectors.

    Returns:
      The generator.

    Example:
      >>> from fedjax_het.nn import make_generator
      >>> generator = make_generator(num_classes=3, num_features=5, hidden=4, noise_size=2)
      >>> import jax
      >>> generator.init(jax.random.key(0))["params"]["features"]["kernel"].shape
      (4, 5)
    """
    return _make_functions(FeatureGenerator(num_classes, num_features, hidden), noise_size)


def make_image_generator(
    num_classes: int, image_shape: tuple[int, ...], width: int, noise_size: int
) -> Generator:
    """Build FedFTG's generator of normalized images.

    Layers, as in FedFTG's public code (ZhangLin-PKU/FedFTG): linear layers of the noise and of the
    one-hot label, each to `width` maps of a quarter of the image's sides -> batch norm -> twice the
    sides, 3x3 convolution to 2 `width`, batch norm, leaky ReLU -> twice the sides, 3x3 convolution
    to `width`, batch norm, leaky ReLU -> 3x3 convolution to the image's channels, tanh, batch norm
    without parameters. Sides that are no multiple of 4 are cropped. Images have mean 0 and variance
    1, so networks read them without normalization.

    Args:
      num_classes: number of labels.
      image_shape: height, width and channels of an image.
      width: output channels of the last hidden convolution.
      noise_size: length of the noise vectors.

    Returns:
      The generator.

    Example:
      >>> from fedjax_het.nn import make_image_generator
      >>> generator = make_image_generator(3, (6, 8, 1), width=2, noise_size=5)
      >>> import jax, jax.numpy as jnp
      >>> variables = generator.init(jax.random.key(0))
      >>> noise, labels = jnp.zeros((4, 5)), jnp.zeros(4, jnp.int32)
      >>> generator.apply(variables, noise, labels, train=False)[0].shape
      (4, 6, 8, 1)
    """
    return _make_functions(ImageGenerator(num_classes, image_shape, width), noise_size)


def _make_functions(module: nn.Module, noise_size: int) -> Generator:
    """Return the functions of a module that maps noise and labels to outputs."""

    def init(key: jax.Array) -> Variables:
        noise, labels = jnp.zeros((1, noise_size)), jnp.zeros(1, jnp.int32)
        return dict(module.init(key, noise, labels, train=False))

    def apply(variables, noise, labels, *, train, batch_axis: BatchAxis | None = None):
        if not train:
            return module.apply(variables, noise, labels, train=False), variables["state"]
        outputs, updates = module.apply(
            variables, noise, labels, train=True, batch_axis=batch_axis, mutable=["state"]
        )
        return outputs, updates["state"]

    return Generator(noise_size, init, apply)


def compute_diversity_loss(
    noise: jax.Array, outputs: jax.Array, batch_axis: BatchAxis | None
) -> jax.Array:
    """Compute exp(-mean_ij |e_i - e_j|^2 |x_i - x_j|) of a generator's outputs x for noise e.

    Squares are means over the numbers of e, absolute values are means over the numbers of x.

    Args:
      noise: `[B, Z]`.
      outputs: `[B, ...]`.
      batch_axis: the devices that share the batch.

    Returns:
      The loss, which is small if outputs of different noise differ.
    """
    outputs = outputs.reshape(len(outputs), -1)
    noise_gaps = jnp.square(noise[:, None] - gather_rows(noise, batch_axis)).mean(-1)
    gaps = jnp.abs(outputs[:, None] - gather_rows(outputs, batch_axis)).mean(-1)
    mean_gap = sum_over_shards((noise_gaps * gaps).sum(), batch_axis) / float(
        noise_gaps.shape[1] ** 2
    )
    return jnp.exp(-mean_gap)
