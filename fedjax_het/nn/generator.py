"""FedGen's generator, which maps noise and a label to the input of a network's last layer."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.nn.layers import BatchNorm, Linear
from fedjax_het.nn.model import Variables


class Generator(NamedTuple):
    """A generator of features as pure functions.

    Attributes:
      noise_size: length of the noise vectors, Z.
      init: `init(key) -> Variables`.
      apply: `apply(variables, noise [B, Z], labels [B], *, train, batch_axis=None) -> (features
        [B, F], new_state)`. `batch_axis`: the devices that share the batch.
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
    module = FeatureGenerator(num_classes, num_features, hidden)

    def init(key: jax.Array) -> Variables:
        noise, labels = jnp.zeros((1, noise_size)), jnp.zeros(1, jnp.int32)
        return dict(module.init(key, noise, labels, train=False))

    def apply(variables, noise, labels, *, train, batch_axis: BatchAxis | None = None):
        if not train:
            return module.apply(variables, noise, labels, train=False), variables["state"]
        features, updates = module.apply(
            variables, noise, labels, train=True, batch_axis=batch_axis, mutable=["state"]
        )
        return features, updates["state"]

    return Generator(noise_size, init, apply)
