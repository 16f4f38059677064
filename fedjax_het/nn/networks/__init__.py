"""The networks that settings can name."""

from functools import partial
from typing import Any

from fedjax_het.nn.model import Model
from fedjax_het.nn.network import (
    NetworkSpec,
    Shapes,
    Size,
    TokenNumbers,
    build_model,
    check_network_definition,
    to_model,
)
from fedjax_het.nn.networks import (
    cnn,
    cnn1d,
    convnet,
    fasttext,
    fsl_cnn,
    lenet5,
    mlp,
    recurrent,
    resnet8,
    resnet18,
    tabular_mlp,
    transformer,
    vgg11,
)
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.input_kinds import (
    FLOAT_KINDS,
    IMAGE_KINDS,
    MIXED_KINDS,
    SEQUENCE_KINDS,
    SERIES_KINDS,
    TOKEN_KINDS,
    InputKind,
)
from fedjax_het.utils.registry import Registry, get_keyword_parameters, get_summary_line

NETWORKS: Registry[NetworkSpec] = Registry(
    "network",
    [
        NetworkSpec(make.__name__, make, get_summary_line(make), input_kinds)
        for make, input_kinds in (
            (mlp.mlp, FLOAT_KINDS),
            (convnet.convnet, IMAGE_KINDS),
            (cnn.cnn, IMAGE_KINDS),
            (fsl_cnn.fsl_cnn, IMAGE_KINDS),
            (lenet5.lenet5, IMAGE_KINDS),
            (resnet8.resnet8, IMAGE_KINDS),
            (resnet18.resnet18, IMAGE_KINDS),
            (vgg11.vgg11, IMAGE_KINDS),
            (cnn1d.cnn1d, SERIES_KINDS),
            (recurrent.lstm, SEQUENCE_KINDS),
            (recurrent.gru, SEQUENCE_KINDS),
            (transformer.transformer, SEQUENCE_KINDS),
            (fasttext.fasttext, TOKEN_KINDS),
            (tabular_mlp.tabular_mlp, MIXED_KINDS),
        )
    ],
    argument="model",
)
"""Registered networks, the values of the setting `model`."""


@validate_arguments
def make_model(
    name: str,
    input_shape: Shapes,
    num_classes: Size,
    num_tokens: TokenNumbers = None,
    per_token: bool = False,
    **options: Any,
) -> Model:
    """Build a registered network for inputs of a given shape.

    Args:
      name: a name in `NETWORKS`.
      input_shape: shape of the input of one example, such as (H, W, C) of an image.
      num_classes: number of logits.
      num_tokens: number of different tokens, for inputs of tokens; None for inputs of floats.
      per_token: whether the network has logits for each token, see `Model.is_per_token`.
      **options: options of the network, see `NetworkSpec.options`. The files in
        `fedjax_het.nn.networks` document the options of the package's networks.

    Returns:
      The model.

    Raises:
      ConfigError: if the name or an option is unknown (the message lists the network's options), or
        if inputs or values do not fit. For a user's network also in the cases of `to_model`.

    Example:
      >>> from fedjax_het.nn import make_model
      >>> make_model("convnet", (28, 28, 1), 10, width=32).input_shape
      (28, 28, 1)
    """
    network = NETWORKS.require(name)
    if name in NETWORKS.built_in:
        arguments = (network, input_shape, num_classes, options, num_tokens)
        shapes = (input_shape, num_classes, num_tokens, per_token)
        list_alternatives = partial(_list_networks, *shapes)
        model = build_model(*arguments, per_token=per_token, list_alternatives=list_alternatives)
        expected = f"a network of task next_token: {_list_per_token_networks()}"
        require(model.is_per_token or not per_token, "model", name, expected)
        return model
    inputs = (input_shape, num_classes)
    return to_model(network.make, *inputs, name, num_tokens, per_token=per_token, **options)


def _list_networks(
    input_shape: Any, num_classes: int, num_tokens: Any, per_token: bool, kind: InputKind
) -> str:
    """Return the end of a message: the networks of the package that accept the inputs."""

    def accepts(network: NetworkSpec) -> bool:
        if kind not in network.input_kinds:
            return False
        arguments: tuple[Any, ...] = (network, input_shape, num_classes, {}, num_tokens)
        try:
            model = build_model(*arguments, per_token=per_token)
        except ConfigError:
            return False
        return model.is_per_token or not per_token

    names = [name for name in NETWORKS if name in NETWORKS.built_in and accepts(NETWORKS[name])]
    return f"; model={' or '.join(names)} accepts these inputs" if names else ""


def _list_per_token_networks() -> str:
    names = [
        name
        for name, network in NETWORKS.items()
        if name in NETWORKS.built_in and "per_token" in get_keyword_parameters(network.make)
    ]
    return ", ".join(names)


@validate_arguments
def register_network(name: str, make: Any, description: str = "") -> None:
    """Register a user's network for runs, sweeps and reports of this process.

    The network itself is checked when the shape of the inputs is known, see `to_model`.

    Args:
      name: name of the network in settings.
      make: a network as in `NetworkSpec.make`. Flax modules are called `module(x, train=...)`,
        `(x, training=...)`, `(x, deterministic=...)` or `(x)`, by their signature, see
        `fedjax_het.nn.adapters.make_flax_model`. For pairs see
        `fedjax_het.nn.adapters.make_pair_model`.
      description: one line for `fedjax-het list`; default: the first line of the docstring.

    Raises:
      ConfigError: if the name is not an identifier or belongs to one of the package's networks, or
        if `make` is not a network or function.

    Example:
      >>> import flax.linen as nn
      >>> from fedjax_het.nn import NETWORKS, make_model, register_network
      >>> class Linear(nn.Module):
      ...     num_classes: int
      ...     @nn.compact
      ...     def __call__(self, x, train):
      ...         return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
      >>> register_network("example", Linear)  # then RunSpec("fedavg", "digits", model="example")
      >>> make_model("example", (4, 4, 1), 3).num_classes
      3
      >>> NETWORKS.reset()  # unregisters all users' networks
    """
    check_network_definition(name, make)
    NETWORKS.add(NetworkSpec(name, make, description or get_summary_line(make)))
