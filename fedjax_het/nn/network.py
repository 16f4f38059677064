"""Named networks, and the conversion of a user's network to a `Model`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn

from fedjax_het.nn.adapters import make_flax_model, make_pair_model
from fedjax_het.nn.model import Model
from fedjax_het.nn.model_validation import check_model, reraise_as_config_error
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.env import require_devices
from fedjax_het.utils.errors import ConfigError, format_value, is_integer_at_least, require
from fedjax_het.utils.registry import (
    call_with_supported,
    get_keyword_parameters,
    get_qualified_name,
    validate_keyword_arguments,
)

MAX_SIZE = 2**16  # maximum of height and width in pixels, channels and classes
# Arguments that are no options: the package passes the first two, flax adds the others to modules.
_INFERRED_ARGUMENTS = ("input_shape", "num_classes", "parent", "name")
ACCEPTED_NETWORKS = (
    "a flax.linen module or its class, an (init, apply) pair, a Model, or a function that returns "
    "one of them"
)


class NetworkSpec(NamedTuple):
    """A network with a name and options.

    Attributes:
      name: name of the network in settings.
      make: a function `make(input_shape, num_classes, **options)` that returns a `Model`, a
        flax.linen module or an (init, apply) pair; `input_shape` and `num_classes` are passed only
        if the signature has them. Or the class of a flax.linen module, whose fields are the
        options. Or a module, a pair or a `Model` itself, without options.
      description: one line for `fedjax-het list`.

    Example:
      >>> from fedjax_het.nn import NETWORKS
      >>> NETWORKS["mlp"].options
      {'hidden': (128, 128)}
    """

    name: str
    make: Any
    description: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the signature with their defaults, or `REQUIRED`."""
        return (
            get_keyword_parameters(self.make, exclude=_INFERRED_ARGUMENTS)
            if _is_factory(self.make)
            else {}
        )

    def validate_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options to the types of their annotations.

        Args:
          options: values by option name.

        Returns:
          The converted options.

        Raises:
          ConfigError: if an option is unknown, missing or of the wrong type.
        """
        owner = f"network {self.name!r}"
        return validate_keyword_arguments(owner, options, self.make, self.options, "option")


@validate_arguments
def to_model(
    network: Any,
    input_shape: Sequence[int],
    num_classes: int,
    name: str = "user",
    **options: Any,
) -> Model:
    """Convert a user's network to a `Model`.

    Cost: three abstract evaluations. Nothing compiles.

    Args:
      network: a network as in `NetworkSpec.make`.
      input_shape: height, width and channels of the images.
      num_classes: number of logits.
      name: name of the network in messages.
      **options: options of the network's signature.

    Returns:
      The checked model.

    Raises:
      ConfigError: in one line that names the network, the function and the shape or leaf. The
        causes are an unknown option, a call that fails, logits that are not `[B, num_classes]`,
        parameters that are not arrays of floats, a state that changes its shape, and dropout or
        batch norm without a training flag.

    Example:
      >>> import flax.linen as nn
      >>> from fedjax_het.nn import to_model
      >>> class Classifier(nn.Module):
      ...     num_classes: int
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
      >>> model = to_model(Classifier, (4, 4, 1), 3)
      >>> model.num_classes, model.head.path
      (3, ('Dense_0',))
    """
    owner = f"network {name!r}"
    model = build_model(NetworkSpec(name, network), input_shape, num_classes, options)
    function = (
        f"{_get_function_name(network)}.__call__"
        if _is_flax_module(network)
        else _get_function_name(network)
    )
    has_input_shape = model.input_shape == tuple(input_shape)
    require(has_input_shape, owner, model.input_shape, f"one of {tuple(input_shape)} images")
    check_model(model, owner, function, num_classes)
    return model


def build_model(
    network: NetworkSpec, input_shape: Sequence[int], num_classes: int, options: dict[str, Any]
) -> Model:
    """Build a network's `Model` and check its options only, see `to_model`.

    Args:
      network: the named network.
      input_shape: height, width and channels of the images.
      num_classes: number of logits.
      options: options of the network's signature.

    Returns:
      The model, whose outputs are not checked.

    Raises:
      ConfigError: if an argument or option is invalid, or building the network fails.
    """
    sides = [size for size in input_shape if is_integer_at_least(size, 1) and int(size) <= MAX_SIZE]
    is_valid = len(input_shape) == 3 == len(sides)
    expected = f"three positive integers of at most {MAX_SIZE}: height, width, channels"
    require(is_valid, "input_shape", input_shape, expected)
    is_valid = is_integer_at_least(num_classes, 1) and int(num_classes) <= MAX_SIZE
    require(is_valid, "num_classes", num_classes, f"a positive whole number of at most {MAX_SIZE}")
    require_devices()  # jax initializes devices even for abstract evaluation
    height, width, channels = (int(size) for size in input_shape)
    shape = (height, width, channels)
    owner = f"network {network.name!r}"
    options = network.validate_options(options)
    with reraise_as_config_error(owner, get_qualified_name(network.make)):
        definition = network.make
        if _is_factory(definition):
            available_arguments = {"input_shape": shape, "num_classes": int(num_classes)}
            definition = call_with_supported(definition, available_arguments, **options)
        return _wrap_model(definition, owner, shape, int(num_classes))._replace(name=network.name)


def check_network_definition(name: str, make: Any) -> None:
    """Raise ConfigError if `make` is neither a network nor a function.

    Args:
      name: name of the network in the message.
      make: a network as in `NetworkSpec.make`.

    Raises:
      ConfigError: if `make` is neither a network nor a function.
    """
    require(_is_factory(make) or _is_network(make), f"network {name!r}", make, ACCEPTED_NETWORKS)


def _wrap_model(
    definition: Any, owner: str, shape: tuple[int, int, int], num_classes: int
) -> Model:
    """Return the `Model` of a network definition, or raise ConfigError."""
    if isinstance(definition, Model):
        return definition
    if isinstance(definition, nn.Module):
        return make_flax_model(definition, shape)
    if _is_pair(definition):
        module = getattr(definition[0], "__self__", None)
        if isinstance(module, nn.Module):  # (module.init, module.apply)
            return make_flax_model(module, shape)
        init, apply = definition
        return make_pair_model(init, apply, shape, num_classes)
    raise ConfigError(f"{owner} = {format_value(definition)}: expected {ACCEPTED_NETWORKS}")


def _is_pair(value: Any) -> bool:
    """Return whether `value` is a pair of functions."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))


def _is_network(value: Any) -> bool:
    """Return whether `value` is a `Model`, a flax module or an (init, apply) pair."""
    return isinstance(value, Model | nn.Module) or _is_pair(value)


def _is_factory(value: Any) -> bool:
    """Return whether `value` must be called to get a network.

    A flax module can be called too, but is itself a network.
    """
    return callable(value) and not _is_network(value)


def _is_flax_module(value: Any) -> bool:
    """Return whether `value` is a flax module or its class."""
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    return is_class or isinstance(value, nn.Module)


def _get_function_name(network: Any) -> str:
    """Return the name of the user's function in messages."""
    return get_qualified_name(network[1]) if _is_pair(network) else get_qualified_name(network)
