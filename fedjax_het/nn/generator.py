"""FedGen's generator: from noise and a label to what a network's last layer reads."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.nn.models import Variables


class Generator(NamedTuple):
    """`init(key) -> Variables` and

    `apply(variables, noise [B, noise_size], labels [B], *, train) -> (features [B, F], new_state)`,
    where new_state is `variables["state"]` with the batch in its statistics if `train` is true.
    """

    noise_size: int
    init: Callable[[jax.Array], Variables]
    apply: Callable


def make_generator(num_classes: int, num_features: int, hidden: int, noise_size: int) -> Generator:
    """[noise, one-hot label] -> linear, `hidden` -> batch norm -> ReLU -> linear, `num_features`,
    with no activation at the end, as FedGen's public code has it (zhuangdizhu/FedGen); weights are
    drawn as PyTorch does by default."""
    from fedjax_het.nn import modules  # here, since flax is slow to import

    module = modules.FeatureGenerator(num_classes, num_features, hidden)

    def init(key: jax.Array) -> Variables:
        noise, labels = jnp.zeros((1, noise_size)), jnp.zeros(1, jnp.int32)
        return dict(module.init(key, noise, labels, train=False))

    def apply(variables, noise, labels, *, train):
        if not train:
            return module.apply(variables, noise, labels, train=False), variables["state"]
        features, new = module.apply(variables, noise, labels, train=True, mutable=["state"])
        return features, new["state"]

    return Generator(noise_size, init, apply)
