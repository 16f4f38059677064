"""The networks that settings can name."""

from collections.abc import Sequence
from typing import Any

from fedjax_het.nn.model import Model
from fedjax_het.nn.network import NetworkSpec, build_model, check_network_definition, to_model
from fedjax_het.nn.networks import cnn, convnet, fsl_cnn, mlp, resnet18
from fedjax_het.utils.introspection import get_summary_line
from fedjax_het.utils.registry import Registry
from fedjax_het.utils.validation import validate_arguments

NETWORKS: Registry[NetworkSpec] = Registry(
    "network",
    (mlp.NETWORK, convnet.NETWORK, cnn.NETWORK, fsl_cnn.NETWORK, resnet18.NETWORK),
    argument="model",
)


@validate_arguments
def make_model(name: str, input_shape: Sequence[int], num_classes: int, **options: Any) -> Model:
    """The network `name`, one of `NETWORKS`, for images of `input_shape` (height, width, channels).

    options: what the network's function takes, see `network_options`; the package's are documented
        in their files of `fedjax_het.nn.networks`.
    Raises: ConfigError for an option that the network does not have, naming its own, and for images
      or values that do not fit; for a user's network also as `to_model`.
    """
    network = NETWORKS.require(name)
    if name in NETWORKS.built_in:
        return build_model(network, input_shape, num_classes, options)
    return to_model(network.make, input_shape, num_classes, name, **options)


@validate_arguments
def get_network_options(name: str) -> dict[str, Any]:
    """The options of a network, by its function's signature: their defaults, or `REQUIRED`."""
    return NETWORKS.require(name).options


@validate_arguments
def register_network(name: str, make: Any, description: str = "") -> None:
    """Make a network of one's own known to runs, sweeps and reports, as long as this process lasts.

        class Lenet(flax.linen.Module):
            num_classes: int
            hidden: int = 84

            @flax.linen.compact
            def __call__(self, x, train): ...  # logits [B, num_classes]

        register_network("lenet", Lenet)
        RunSpec("fedavg", "digits", model="lenet")

    make: see `NetworkSpec`. Flax modules are called `module(x, train=...)`, `(x, training=...)`,
        `(x, deterministic=...)` or `(x)`, by their signature, see `flax_model`; for pairs see
        `pair_model`.
    description: for `fedjax-het list`; by default the first line of the docstring.

    Raises: ConfigError for a name of the package's own or no word, and for what makes no network.
      What it makes is checked when images are known, see `to_model`.
    """
    check_network_definition(name, make)
    NETWORKS.add(NetworkSpec(name, make, description or get_summary_line(make)))
