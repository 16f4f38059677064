"""What a network is to everything else: pure functions on plain dicts.

Which of a network's variables belong to its normalisation layers.
"""

from collections.abc import Callable, Sequence
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

    `can_shard_batch` says that devices may share a batch in training, each taking a part of the
    samples: `apply` and `embed` then get the `BatchAxis` of the batch as `batch_axis`, and give what
    they give for the whole batch, see `nn.batch_axis`.

    `takes_conv_impl` says that `apply` and `embed` take `conv_impl`, the implementation of the
    convolutions that leave it open ("auto").

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
    takes_conv_impl: bool = False


def count_cached_samples(height: int, width: int, channels: int) -> int:
    """How many samples' activations of a layer with such outputs fit a core's cache; at least 2."""
    return max(2, CACHED_ACTIVATIONS // (height * width * channels))


def count_parameters(variables: Variables) -> int:
    """Trainable numbers in `variables["params"]` (running statistics not counted)."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


Tree = Any


def norm_mask(model: Model, variables: Variables) -> Tree:
    """True where a leaf of `variables` is a scale, a shift or a running statistic of a
    normalisation layer: a tree of bools of the same structure.

    By the kind of layer that made it, see `Model.norm_layers`: a layer's name may say nothing, and
    a shortcut's is easily missed.
    """
    layers = model.norm_layers()

    def is_norm_leaf(path, leaf):
        inner = path[1:]  # without "params" or "state"
        names = tuple(jax.tree_util.keystr(inner, simple=True, separator="/").split("/"))
        return any(names[: len(layer)] == layer for layer in layers)

    return jax.tree_util.tree_map_with_path(is_norm_leaf, variables)


def get_norm_variables(model: Model, variables: Variables) -> tuple[jax.Array, ...]:
    """The leaves that `norm_mask` marks, in order."""
    leaves, marks = jax.tree.leaves(variables), jax.tree.leaves(norm_mask(model, variables))
    return tuple(leaf for leaf, mark in zip(leaves, marks, strict=True) if mark)


def replace_norm_variables(
    model: Model, variables: Variables, norms: Sequence[jax.Array]
) -> Variables:
    """`variables` with these in place of the leaves that `norm_mask` marks."""
    leaves, structure = jax.tree.flatten(variables)
    marks = jax.tree.leaves(norm_mask(model, variables))
    norm_values = iter(norms)
    merged = [next(norm_values) if mark else leaf for leaf, mark in zip(leaves, marks, strict=True)]
    return jax.tree.unflatten(structure, merged)
