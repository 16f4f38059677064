"""The package's interface to a network: pure functions on plain dicts.

The module also finds the variables of a network's normalization layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.nn.batch_axis import BatchAxis, make_axis_argument
from fedjax_het.utils.arrays import AnyArray, make_key
from fedjax_het.utils.errors import ConfigError, display_name
from fedjax_het.utils.input_kinds import InputShape, NumTokens, map_arrays

# {"params": tree, "state": tree}; "state" is {} without running statistics.
Variables = dict[str, Any]
Shape = tuple[int, ...]

# Activations of one layer (0.5 MB in float32): the L2 cache must hold several such arrays per step.
CACHED_ACTIVATIONS = 2**17


USER_NETWORK = "user"
"""Name of a network that the user passes as the argument `network`."""
_PART_MEANINGS = {
    "embed": "`embed`, the function that computes features [B, F]",
    "head": "`head`, the fully connected layer that maps features [B, F] to logits",
}


class Head(NamedTuple):
    """The last fully connected layer of a network, as a pure function.

    Attributes:
      path: keys that lead to the layer's parameters within the network's `params`; `()` if the
        layer is the whole network.
      apply: `apply(parameters, features [B, F]) -> logits [B, num_classes]`.

    Example:
      >>> import jax
      >>> from fedjax_het.nn import make_model
      >>> model = make_model("mlp", (4, 4, 1), 3, hidden=[5])
      >>> model.head.path
      ('head',)
      >>> layer = model.head.get_parameters(model.init(jax.random.key(0)))
      >>> layer["kernel"].shape
      (5, 3)
    """

    path: tuple[str, ...]
    apply: Callable[[Any, jax.Array], jax.Array]

    def get_parameters(self, variables: Variables) -> Any:
        """Return the layer's parameters.

        Args:
          variables: variables of the network.

        Returns:
          The subtree of `variables["params"]` at `path`.
        """
        layer = variables["params"]
        for name in self.path:
            layer = layer[name]
        return layer

    def replace_parameters(self, variables: Variables, parameters: Any) -> Variables:
        """Return the variables with other parameters of the layer.

        Args:
          variables: variables of the network, with or without the layer.
          parameters: the new subtree of `variables["params"]` at `path`; None: no subtree.

        Returns:
          The new variables.

        Example:
          >>> import jax
          >>> from fedjax_het.nn import make_model
          >>> model = make_model("mlp", (4, 4, 1), 3, hidden=[5])
          >>> body = model.head.replace_parameters(model.init(jax.random.key(0)), None)
          >>> sorted(body["params"])
          ['hidden1']
        """

        def replace(tree: Any, path: tuple[str, ...]) -> Any:
            if not path:
                return parameters
            name, *inside = path
            subtree = replace(tree.get(name, {}), tuple(inside))
            others = {key: value for key, value in tree.items() if key != name}
            return others if subtree is None else {**others, name: subtree}

        return {**variables, "params": replace(variables["params"], self.path)}


class Model(NamedTuple):
    """A network as pure functions.

    Inputs `x` are `[B, *input_shape]`: normalized images `[B, H, W, C]`, features `[B, F]` or
    series `[B, T, F]` of float32, or int32 tokens `[B, T]`; or a dictionary of them. `key` is for
    networks that draw random numbers, such as dropout masks in training: one key for the whole
    batch. Without a key nothing is dropped.

    Attributes:
      name: name of the network in messages and results.
      input_shape: shape of the input of one example, such as (H, W, C) of an image; or shapes by
        name.
      num_classes: number of logits, or of other outputs, C.
      init: `init(key) -> Variables`.
      apply: `apply(variables, x, *, train, key=None) -> (logits [B, num_classes], new_state)`.
        `new_state` is `variables["state"]` after the batch if the network has running statistics
        and `train` is true, and `variables["state"]` unchanged otherwise.
      micro_batch: number of samples that a training step processes at once, see
        `micro_batched_value_and_grad`. None: the whole batch, also for networks that mix samples in
        training.
      cached_samples: number of samples whose activations fit the cache of one CPU core, for passes
        with `train=False`, in which no network mixes samples. None: no limit.
      embed: `embed(variables, x, *, train, key=None) -> (features [B, F], logits, new_state)`; the
        features are the input of the last fully connected layer. None: the network has no such
        layer, so methods that need one cannot use it.
      norm_layers: returns the paths of the normalization layers within `params` and `state`, see
        `norm_mask`.
      head: the last fully connected layer, or None.
      can_shard_batch: whether devices may share a training batch, each with a part of the samples.
        All layers must then compute the same result for a whole and a shared batch, see
        `fedjax_het.nn.batch_axis`. `apply` and `embed` then receive the `BatchAxis` as
        `batch_axis`.
      takes_conv_impl: whether `apply` and `embed` receive `conv_impl`, the implementation of the
        convolutions with `impl="auto"`.
      takes_sample_mask: whether `apply` and `embed` receive `sample_mask` in training, float32
        `[B]`: 1 for real samples, 0 for samples that fill up the batch. Batch norm leaves the
        latter out.
      num_tokens: number of different tokens, for inputs of tokens; None for inputs of floats.
      is_per_token: whether there are outputs `[B, T, num_classes]` for each token.
      input_layer: key in `params` of a fully connected layer, with `kernel` and `bias`, that
        receives all values of an input and is the only layer that does. `apply` then takes
        `input_product` `[B, F]` in place of the product of inputs and kernel. None: the network has
        no such layer.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.nn import make_model
      >>> model = make_model("mlp", (4, 4, 1), 3)
      >>> variables = model.init(jax.random.key(0))
      >>> logits, state = model.apply(variables, jnp.zeros((2, 4, 4, 1)), train=False)
      >>> logits.shape
      (2, 3)
    """

    name: str
    input_shape: InputShape
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
    takes_sample_mask: bool = False
    num_tokens: NumTokens = None
    is_per_token: bool = False
    input_layer: str | None = None

    @property
    def output_shape(self) -> Shape:
        """Shape of the outputs of one example: (C,), or (T, C) with outputs per token."""
        if self.is_per_token and isinstance(self.input_shape, tuple):
            return (*self.input_shape[:1], self.num_classes)
        return (self.num_classes,)

    def make_inputs(self, count: int) -> Any:
        """Return zeros in the format of the inputs of `count` examples, to trace the network."""
        return make_inputs(self.input_shape, self.num_tokens, count)

    def make_batch_arguments(
        self, sample_mask: AnyArray | None, batch_axis: BatchAxis | None = None
    ) -> dict[str, Any]:
        """Return the arguments of `apply` and `embed` that describe a training batch.

        Args:
          sample_mask: `[B]`, see `takes_sample_mask`; None: all samples are real.
          batch_axis: the devices that share the batch; None: the batch is whole.

        Returns:
          Keyword arguments that the network takes.

        Example:
          >>> import numpy as np
          >>> from fedjax_het.nn import make_model
          >>> model = make_model("convnet", (8, 8, 1), 3, width=2, depth=1, norm="batch")
          >>> model.make_batch_arguments(np.ones(2, np.float32))
          {'sample_mask': array([1., 1.], dtype=float32)}
        """
        arguments: dict[str, Any] = {**make_axis_argument(batch_axis)}
        if self.takes_sample_mask and sample_mask is not None:
            arguments["sample_mask"] = sample_mask
        return arguments


def name_network(model: Model) -> str:
    """Return the argument that chose a network, with its value, for messages."""
    if model.name == USER_NETWORK:
        return display_name("network")
    return f"{display_name('model')} = {model.name!r}"


def require_parts(model: Model, *parts: str, alternative: str = "") -> None:
    """Require that a network has `embed`, `head` or both.

    Args:
      model: the network.
      *parts: names of the required fields of `Model`.
      alternative: other input that the method accepts, for the message.

    Raises:
      ConfigError: if the network lacks a part.

    Example:
      >>> from fedjax_het import ConfigError
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.nn.model import require_parts
      >>> network = make_model("mlp", (4, 4, 1), 3)._replace(embed=None)
      >>> require_parts(network, "head")
      >>> try:
      ...     require_parts(network, "head", "embed")
      ... except ConfigError as error:
      ...     print(str(error).partition(":")[0])
      model = 'mlp' has no known `embed`, the function that computes features [B, F]
    """
    missing = [_PART_MEANINGS[part] for part in parts if getattr(model, part) is None]
    if missing:
        listed = " and ".join(f"`{part}`" for part in sorted(parts))
        raise ConfigError(
            f"{name_network(model)} has no known {', nor '.join(missing)}: expected a flax.linen "
            f"module whose logits are the output of its last nn.Dense, or a `Model` with {listed}"
            f"{alternative}"
        )


def make_inputs(input_shape: InputShape, num_tokens: NumTokens, count: int) -> Any:
    """Return zeros in the format of a network's inputs, to trace the network.

    Args:
      input_shape: shape of the input of one example, or shapes by name.
      num_tokens: number of different tokens; None for inputs of floats; or by name.
      count: number of examples, B.

    Returns:
      Zeros `[B, *input_shape]`: int32 for tokens, otherwise floats; or a dictionary of them.

    Example:
      >>> from fedjax_het.nn.model import make_inputs
      >>> make_inputs((5,), 30, 2).dtype.name
      'int32'
    """

    def make_array(shape: Shape, num_tokens: int | None) -> jax.Array:
        dtype = jnp.result_type(float) if num_tokens is None else jnp.int32
        return jnp.zeros((count, *shape), dtype)

    return map_arrays(make_array, input_shape, num_tokens)


def count_features(model: Model) -> int:
    """Return the number of features, F, of a network with `embed`."""
    embed = model.embed
    assert embed is not None

    def compute_features(key):
        return embed(model.init(key), model.make_inputs(1), train=False)[0]

    return jax.eval_shape(compute_features, make_key(0)).shape[-1]


def count_cached_samples(height: int, width: int, channels: int) -> int:
    """Count the samples whose activations of one layer fit the cache of a CPU core.

    Args:
      height: height of the layer's output in pixels.
      width: width of the layer's output in pixels.
      channels: channels of the layer's output.

    Returns:
      Number of samples, at least 2.
    """
    return max(2, CACHED_ACTIVATIONS // (height * width * channels))


def count_parameters(variables: Variables) -> int:
    """Count the trainable numbers of a network.

    Args:
      variables: variables of the network.

    Returns:
      Total size of the leaves of `variables["params"]`; running statistics are not counted.

    Example:
      >>> import jax
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.nn import count_parameters
      >>> count_parameters(make_model("mlp", (2, 2, 1), 3, hidden=[5]).init(jax.random.key(0)))
      43
    """
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


Tree = Any


def norm_mask(model: Model, variables: Variables) -> Tree:
    """Mark the variables of the normalization layers.

    The kind of a layer decides, see `Model.norm_layers`. A name may not reveal the kind, and a
    residual shortcut's normalization is easily missed.

    Args:
      model: the network.
      variables: variables of `model`, arrays or shapes.

    Returns:
      Tree of bools with the structure of `variables`: True where a leaf is the scale, the shift or
      a running statistic of a normalization layer.

    Example:
      >>> import jax
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.nn import norm_mask
      >>> model = make_model("convnet", (8, 8, 1), 3, width=2, depth=1)
      >>> mask = norm_mask(model, model.init(jax.random.key(0)))
      >>> mask["params"]["norm1"], mask["params"]["head"]
      ({'bias': True, 'scale': True}, {'bias': False, 'kernel': False})
    """
    layers = model.norm_layers()

    def is_norm_leaf(path, leaf):
        # The first part of the path is "params" or "state".
        names = tuple(jax.tree_util.keystr(path[1:], simple=True, separator="/").split("/"))
        return any(names[: len(layer)] == layer for layer in layers)

    return jax.tree_util.tree_map_with_path(is_norm_leaf, variables)


def get_norm_variables(model: Model, variables: Variables) -> tuple[jax.Array, ...]:
    """Return the variables of the normalization layers.

    Args:
      model: the network.
      variables: variables of `model`.

    Returns:
      The leaves that `norm_mask` marks, in the order of `jax.tree.leaves`.

    Example:
      >>> import jax
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.nn import get_norm_variables
      >>> model = make_model("convnet", (8, 8, 1), 3, width=2, depth=1)
      >>> [leaf.shape for leaf in get_norm_variables(model, model.init(jax.random.key(0)))]
      [(2,), (2,)]
    """
    leaves, is_norm = jax.tree.leaves(variables), jax.tree.leaves(norm_mask(model, variables))
    return tuple(leaf for leaf, mark in zip(leaves, is_norm, strict=True) if mark)
