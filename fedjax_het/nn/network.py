"""A network with a name, and whatever a user writes as a `Model`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn

from fedjax_het.common.doors import door
from fedjax_het.common.errors import ConfigError, is_whole, require, shown
from fedjax_het.common.signatures import call_with, called, checked_given, parameters_of
from fedjax_het.common.variables import require_devices
from fedjax_het.nn.contract import check_network, errors_named
from fedjax_het.nn.flax_model import flax_model
from fedjax_het.nn.models import Model
from fedjax_het.nn.pair_model import pair_model

# What a function of a network is given, and what flax adds to every module's fields.
MOST = 2**16  # pixels of a side, channels, classes
_FILLED_IN = ("input_shape", "num_classes", "parent", "name")
WHAT_MAKES_ONE = (
    "a flax.linen module or its class, an (init, apply) pair, a Model, or a function that returns "
    "one of them"
)


class Network(NamedTuple):
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
        return parameters_of(self.make, besides=_FILLED_IN) if _makes(self.make) else {}

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options that it takes, as their annotations have them. Raises ConfigError."""
        owner = f"network {self.name!r}"
        return checked_given(owner, options, self.make, self.options, "option")


@door
def as_model(
    network: Any,
    input_shape: Sequence[int],
    num_classes: int,
    name: str = "user",
    **options: Any,
) -> Model:
    """What a user writes as a `Model` for images of `input_shape` (height, width, channels).

    network: as `Network.make`. options: what its signature takes besides.
    Cost: three abstract evaluations.
    Raises: ConfigError in one line, before anything compiles, that names the network, the function
      and the shape or leaf: for an option that it does not have, a call that fails, logits that are
      not [B, num_classes], parameters that are no arrays of floats, a state that changes its shape,
      or dropout and batch norm without a training flag.
    """
    owner = f"network {name!r}"
    model = model_of(Network(name, network), input_shape, num_classes, options)
    function = f"{_core(network)}.__call__" if _is_flax(network) else _core(network)
    fits = model.input_shape == tuple(input_shape)
    require(fits, owner, model.input_shape, f"one of {tuple(input_shape)} images")
    check_network(model, owner, function, num_classes)
    return model


def model_of(
    network: Network, input_shape: Sequence[int], num_classes: int, options: dict[str, Any]
) -> Model:
    """The network's `Model`, unchecked but for its options; see `as_model`."""
    sides = [size for size in input_shape if is_whole(size, 1) and int(size) <= MOST]
    ok = len(input_shape) == 3 == len(sides)
    expected = f"three positive integers of at most {MOST}: height, width, channels"
    require(ok, "input_shape", input_shape, expected)
    ok = is_whole(num_classes, 1) and int(num_classes) <= MOST
    require(ok, "num_classes", num_classes, f"a positive whole number of at most {MOST}")
    require_devices()  # for shapes alone, but jax asks for them
    height, width, channels = (int(size) for size in input_shape)
    shape = (height, width, channels)
    owner = f"network {network.name!r}"
    options = network.checked(options)
    with errors_named(owner, called(network.make)):
        made = network.make
        if _makes(made):
            offered = {"input_shape": shape, "num_classes": int(num_classes)}
            made = call_with(made, offered, **options)
        return _wrapped(made, owner, shape, int(num_classes))._replace(name=network.name)


def check_makes_network(name: str, make: Any) -> None:
    """Raise ConfigError for what is no network and no function."""
    require(_makes(make) or _is_network(make), f"network {name!r}", make, WHAT_MAKES_ONE)


def _wrapped(made: Any, owner: str, shape: tuple[int, int, int], num_classes: int) -> Model:
    if isinstance(made, Model):
        return made
    if isinstance(made, nn.Module):
        return flax_model(made, shape)
    if _is_pair(made):
        module = getattr(made[0], "__self__", None)
        if isinstance(module, nn.Module):  # (module.init, module.apply)
            return flax_model(module, shape)
        init, apply = made
        return pair_model(init, apply, shape, num_classes)
    raise ConfigError(f"{owner} = {shown(made)}: expected {WHAT_MAKES_ONE}")


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))


def _is_network(value: Any) -> bool:
    return isinstance(value, Model | nn.Module) or _is_pair(value)


def _makes(value: Any) -> bool:
    """Whether it must be called for a network. A module can be called too, but is one."""
    return callable(value) and not _is_network(value)


def _is_flax(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    return is_class or isinstance(value, nn.Module)


def _core(network: Any) -> str:
    """What to call the user's function in messages."""
    return called(network[1]) if _is_pair(network) else called(network)
