"""The partitions that settings can name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.data import partition_schemes
from fedjax_het.data.grouped_partition import (
    compute_grouped_mixtures,
    grouped,
    resolve_grouped_parameters,
)
from fedjax_het.utils.introspection import (
    get_keyword_parameters,
    get_summary_line,
    validate_keyword_arguments,
)
from fedjax_het.utils.registry import Registry
from fedjax_het.utils.validation import validate_arguments

# What a scheme's function is given by name where its signature has it; all else it takes is chosen.
DATA_ARGUMENTS = (
    *("rng", "labels", "num_classes", "num_clients"),
    *("domains", "domain_names", "class_names"),
)
# Parameters that go by two names.
_SYNONYMS = {"classes": "classes_per_client", "classes_per_client": "classes"}


class PartitionScheme(NamedTuple):
    """A way to split training examples among clients.

    split: `(rng, labels, num_classes, num_clients, *, parameters...) -> clients`, one array of
        positions in the training set for each client. `rng` is a NumPy Generator of the seed. It is
        called by name; it may also ask for the data set's `domains` [N] (None where it has none),
        `domain_names` and `class_names`. All else in its signature are parameters of the partition.
    setting: `(labels, num_classes, num_clients, class_names, **parameters) -> parameters`, for a
        scheme whose defaults depend on the data: checks what is given and fills in what is not.
    mixtures: `(labels, num_classes, num_clients, **parameters) -> [K, C]`, the class proportions
        that clients draw from, where these are known better than from what was drawn.
    clients_are_domains: client k holds examples of the data set's domain k alone: it goes by the
        domain's name, and is tested on that domain's test images.
    """

    name: str
    split: Callable[..., Any]
    description: str = ""
    resolve_parameters: Callable[..., dict[str, Any]] | None = None
    mixtures: Callable[..., np.ndarray] | None = None
    clients_are_domains: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """What the split takes besides the data, with defaults or `REQUIRED`."""
        return get_keyword_parameters(self.split, exclude=DATA_ARGUMENTS)

    def validate_parameters(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters that it takes, as their annotations have them. Raises ConfigError."""
        owner = f"partition {self.name!r}"
        return validate_keyword_arguments(
            owner, parameters, self.split, self.parameters, "parameter"
        )


PARTITIONS: Registry[PartitionScheme] = Registry(
    "partition",
    (
        PartitionScheme(
            "iid",
            partition_schemes.iid,
            "a random split into equal parts",
            mixtures=partition_schemes.compute_iid_mixtures,
        ),
        PartitionScheme(
            "dirichlet",
            partition_schemes.dirichlet,
            "label skew by Dir(alpha) for each class; sizes very unequal, maybe empty",
        ),
        PartitionScheme(
            "dirichlet_balanced",
            partition_schemes.dirichlet_balanced,
            "label skew by Dir(alpha), clients nearly equal in size (DynaFed)",
        ),
        PartitionScheme(
            "dirichlet_capped",
            partition_schemes.dirichlet_capped,
            "label skew by Dir(alpha), none far above N/K, at least min_size each (MOON, FedAF)",
        ),
        PartitionScheme(
            "classes_per_client",
            partition_schemes.classes_per_client,
            "exactly classes_per_client labels each, all of one size (FSL)",
        ),
        PartitionScheme(
            "pathological",
            partition_schemes.pathological,
            "classes_per_client with two labels each (FedAMP)",
        ),
        PartitionScheme(
            "grouped",
            grouped,
            "groups of clients, each with dominating classes: 80 % of the data (FedAMP)",
            resolve_parameters=resolve_grouped_parameters,
            mixtures=compute_grouped_mixtures,
        ),
        PartitionScheme(
            "by_domain",
            partition_schemes.by_domain,
            "one client for each domain of a data set that has domains",
            clients_are_domains=True,
        ),
    ),
)


@validate_arguments
def get_partition_parameters(name: str) -> dict[str, Any]:
    """The parameters of a partition, by its function's signature: defaults, or `REQUIRED`.

    The number of labels per client, `classes` in settings, is the parameter `classes` or
    `classes_per_client`: see `find_parameter_name`.
    """
    return PARTITIONS.require(name).parameters


def find_parameter_name(name: str, setting: str) -> str | None:
    """What the partition `name` calls a setting (alpha, classes); None where it has no such one."""
    parameters = get_partition_parameters(name)
    names = (setting, _SYNONYMS.get(setting, setting))
    return next((alias for alias in names if alias in parameters), None)


@validate_arguments
def register_partition(
    name: str,
    split: Callable[..., Any],
    description: str = "",
    setting: Callable[..., dict[str, Any]] | None = None,
    mixtures: Callable[..., np.ndarray] | None = None,
    *,
    clients_are_domains: bool = False,
) -> None:
    """Make a partition of one's own known to runs, sweeps and reports, as long as this process
    lasts.

        def halves(rng, labels, num_classes, num_clients, *, share=0.5): ...  # K arrays

        register_partition("halves", halves)
        RunSpec("fedavg", "digits", partition="halves", partition_options={"share": 0.3})

    split, setting, mixtures, clients_are_domains: see `PartitionScheme`. A parameter `alpha` or `classes` is
        the setting of that name. What `split` returns is checked whenever it is called.
    description: for `fedjax-het list`; by default the first line of the docstring.

    Raises: ConfigError for a name of the package's own or no word.
    """
    text = description or get_summary_line(split)
    PARTITIONS.add(PartitionScheme(name, split, text, setting, mixtures, clients_are_domains))
