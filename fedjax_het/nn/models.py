"""What a network is to everything else: pure functions on plain dicts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Variables = dict[str, Any]  # {"params": tree, "state": tree}; "state" is {} without batch norm

CACHED_ACTIVATIONS = 2**17  # of a layer, 0.5 MB: a step holds several such arrays in L2


class Head(NamedTuple):
    """A network's last fully connected layer by itself.

    path: where its parameters are within the network's `params`; () where it is the network.
    apply(parameters, features [B, F]) -> logits [B, num_classes].
    """

    path: tuple[str, ...]
    apply: Callable[[Any, jax.Array], jax.Array]

    def get_parameters(self, variables: Variables) -> Any:
        """Its parameters among those of the network."""
        layer = variables["params"]
        for name in self.path:
            layer = layer[name]
        return layer


class Model(NamedTuple):
    """A network. `init(key) -> Variables` and

    `apply(variables, x, *, train, key=None) -> (logits [B, num_classes], new_state)` for
    `x` [B, H, W, C] float32, normalised. `new_state` is `variables["state"]` after the batch where
    the network keeps running statistics and `train` is true, else unchanged. `key` is for networks
    that draw random numbers, as dropout does in training: one key for the whole batch.
    Without a key nothing is dropped.

    `embed(variables, x, *, train, key=None) -> (features [B, F], logits, new_state)` gives besides
    what the last fully connected layer reads, and `head` is that layer. Networks that have no such
    layer do without (None) where the method does not ask for them.

    `micro_batch` is how many samples a training step should take at once, see
    `micro_batched_value_and_grad` (None: as many as there are, or the network mixes samples in
    training). `cached_samples` is how many samples' activations fit a core's cache (None: as many
    as there are), for passes with train=False, in which no network mixes samples.

    `spreads` says that devices may share a batch in training, each taking a part of the samples:
    the network is made of layers that are the same either way, see `spread`.

    `norm_layers()` are the paths of the normalisation layers within `params` and within `state`,
    see `norm_mask`.
    """

    name: str
    input_shape: tuple[int, int, int]
    num_classes: int
    init: Callable[[jax.Array], Variables]
    apply: Callable[..., tuple[jax.Array, Any]]
    micro_batch: int | None = None
    cached_samples: int | None = None
    embed: Callable[..., tuple[jax.Array, jax.Array, Any]] | None = None
    norm_layers: Callable[[], frozenset[tuple[str, ...]]] = frozenset
    head: Head | None = None
    can_shard_batch: bool = False


def count_cached_samples(height: int, width: int, channels: int) -> int:
    """How many samples' activations of a layer with such outputs fit a core's cache; at least 2."""
    return max(2, CACHED_ACTIVATIONS // (height * width * channels))


def count_parameters(variables: Variables) -> int:
    """Trainable numbers in `variables["params"]` (running statistics not counted)."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
