"""A network with a name, and whatever a user writes as a `Model`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn

from fedjax_het.nn.adapters import make_flax_model, make_pair_model
from fedjax_het.nn.model import Model
from fedjax_het.nn.model_validation import check_model, reraise_as_config_error
from fedjax_het.utils.env import require_devices
from fedjax_het.utils.errors import ConfigError, format_value, is_integer_at_least, require
from fedjax_het.utils.introspection import (
    call_with_supported,
    get_keyword_parameters,
    get_qualified_name,
    validate_keyword_arguments,
)
from fedjax_het.utils.validation import validate_arguments

# What a function of a network is given, and what flax adds to every module's fields.
MAX_SIZE = 2**16  # pixels of a side, channels, classes
_INFERRED_ARGUMENTS = ("input_shape", "num_classes", "parent", "name")
ACCEPTED_NETWORKS = (
    "a flax.linen module or its class, an (init, apply) pair, a Model, or a function that returns "
    "one of them"
)


class NetworkSpec(NamedTuple):
    """A network that can be named.

    make: a function `make(input_shape, num_classes, **options)`, each passed only where its
        signature has it, that returns a `Model`, a flax.linen module or an (init, apply) pair; or
        the class of a module, whose fields are the options; or a module, a pair or a `Model`
        itself, which have none.
    """

    name: str
    make: Any
    description: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Its options, as the signature has them, with their defaults or `REQUIRED`."""
        return (
            get_keyword_parameters(self.make, exclude=_INFERRED_ARGUMENTS)
            if _is_factory(self.make)
            else {}
        )

    def validate_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options that it takes, as their annotations have them. Raises ConfigError."""
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
    """What a user writes as a `Model` for images of `input_shape` (height, width, channels).

    network: as `NetworkSpec.make`. options: what its signature takes besides.
    Cost: three abstract evaluations.
    Raises: ConfigError in one line, before anything compiles, that names the network, the function
      and the shape or leaf: for an option that it does not have, a call that fails, logits that are
      not [B, num_classes], parameters that are no arrays of floats, a state that changes its shape,
      or dropout and batch norm without a training flag.
    """
    owner = f"network {name!r}"
    model = build_model(NetworkSpec(name, network), input_shape, num_classes, options)
    function = (
        f"{_get_function_name(network)}.__call__"
        if _is_flax_module(network)
        else _get_function_name(network)
    )
    fits = model.input_shape == tuple(input_shape)
    require(fits, owner, model.input_shape, f"one of {tuple(input_shape)} images")
    check_model(model, owner, function, num_classes)
    return model


def build_model(
    network: NetworkSpec, input_shape: Sequence[int], num_classes: int, options: dict[str, Any]
) -> Model:
    """The network's `Model`, unchecked but for its options; see `to_model`."""
    sides = [size for size in input_shape if is_integer_at_least(size, 1) and int(size) <= MAX_SIZE]
    ok = len(input_shape) == 3 == len(sides)
    expected = f"three positive integers of at most {MAX_SIZE}: height, width, channels"
    require(ok, "input_shape", input_shape, expected)
    ok = is_integer_at_least(num_classes, 1) and int(num_classes) <= MAX_SIZE
    require(ok, "num_classes", num_classes, f"a positive whole number of at most {MAX_SIZE}")
    require_devices()  # for shapes alone, but jax asks for them
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
    """Raise ConfigError for what is no network and no function."""
    require(_is_factory(make) or _is_network(make), f"network {name!r}", make, ACCEPTED_NETWORKS)


def _wrap_model(
    definition: Any, owner: str, shape: tuple[int, int, int], num_classes: int
) -> Model:
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
    return isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))


def _is_network(value: Any) -> bool:
    return isinstance(value, Model | nn.Module) or _is_pair(value)


def _is_factory(value: Any) -> bool:
    """Whether it must be called for a network. A module can be called too, but is one."""
    return callable(value) and not _is_network(value)


def _is_flax_module(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    return is_class or isinstance(value, nn.Module)


def _get_function_name(network: Any) -> str:
    """What to call the user's function in messages."""
    return get_qualified_name(network[1]) if _is_pair(network) else get_qualified_name(network)
