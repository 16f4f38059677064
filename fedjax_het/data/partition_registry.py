"""Registry of the partition schemes that the setting `partition` names."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.data import partition_schemes
from fedjax_het.data.grouped_partition import (
    compute_grouped_mixtures,
    grouped,
    resolve_grouped_parameters,
)
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.registry import (
    Registry,
    get_keyword_parameters,
    get_summary_line,
    validate_keyword_arguments,
)

# Arguments that a scheme's function receives if its signature has them; others are parameters.
DATA_ARGUMENTS = (
    *("rng", "labels", "num_classes", "num_clients"),
    *("domains", "domain_names", "class_names"),
)
# Parameters with two names.
_SYNONYMS = {"classes": "classes_per_client", "classes_per_client": "classes"}


class PartitionScheme(NamedTuple):
    """Description of a scheme that divides training examples among clients.

    Attributes:
      name: name of the scheme in settings.
      split: function `(rng, labels, num_classes, num_clients, *, parameters...) -> clients`, which
        returns an array of positions in the training set for each client. `rng` is a NumPy
        Generator of the seed. Arguments are passed by name. The signature may also contain
        `domains` `[N]` (None for a data set without domains), `domain_names` and `class_names` of
        the data set. All other arguments are parameters of the partition.
      description: one line for `fedjax-het list`.
      resolve_parameters: function `(labels, num_classes, num_clients, class_names, **parameters) ->
        parameters`, for a scheme whose defaults depend on the data. It checks the parameters and
        sets the missing ones.
      mixtures: function `(labels, num_classes, num_clients, **parameters) -> [K, C]`, the class
        proportions from which the clients draw, if they are known more exactly than from the drawn
        examples.
      clients_are_domains: whether client k holds only examples of domain k of the data set. It then
        has the domain's name and is tested on the domain's test images.

    Example:
      >>> from fedjax_het import data
      >>> data.PARTITIONS["dirichlet_capped"].parameters
      {'alpha': REQUIRED, 'min_size': 10, 'max_draws': 1000}
    """

    name: str
    split: Callable[..., Any]
    description: str = ""
    resolve_parameters: Callable[..., dict[str, Any]] | None = None
    mixtures: Callable[..., np.ndarray] | None = None
    clients_are_domains: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of `split` besides the data, by name, with their default or `REQUIRED`."""
        return get_keyword_parameters(self.split, exclude=DATA_ARGUMENTS)

    def validate_parameters(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Check parameters against the annotations of `split`.

        Args:
          parameters: values by name.

        Returns:
          The values in the types of the annotations.

        Raises:
          ConfigError: if a name is unknown, a required parameter is missing, or a value is invalid.
        """
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
            "label skew by Dir(alpha) for each class; sizes are very unequal and may be 0",
        ),
        PartitionScheme(
            "dirichlet_balanced",
            partition_schemes.dirichlet_balanced,
            "label skew by Dir(alpha); clients of nearly equal size (DynaFed)",
        ),
        PartitionScheme(
            "dirichlet_capped",
            partition_schemes.dirichlet_capped,
            "label skew by Dir(alpha); sizes from min_size to little above N/K (MOON, FedAF)",
        ),
        PartitionScheme(
            "classes_per_client",
            partition_schemes.classes_per_client,
            "exactly classes_per_client labels for each client; clients of equal size (FSL)",
        ),
        PartitionScheme(
            "pathological",
            partition_schemes.pathological,
            "classes_per_client with two labels for each client (FedAMP)",
        ),
        PartitionScheme(
            "grouped",
            grouped,
            "groups of clients with dominating classes that make up 80 % of their data (FedAMP)",
            resolve_parameters=resolve_grouped_parameters,
            mixtures=compute_grouped_mixtures,
        ),
        PartitionScheme(
            "by_domain",
            partition_schemes.by_domain,
            "a client for each domain of a data set with domains",
            clients_are_domains=True,
        ),
    ),
)
"""Partition schemes by name, those of users included.

Example:
  >>> from fedjax_het import data
  >>> data.PARTITIONS["iid"].description
  'a random split into equal parts'
"""


@validate_arguments
def get_partition_parameters(name: str) -> dict[str, Any]:
    """Return the parameters of a partition scheme, as its function declares them.

    Args:
      name: name of the scheme, one of `PARTITIONS`.

    Returns:
      Defaults by name; `REQUIRED` for a parameter without default. The setting `classes`, the
      number of labels per client, is the parameter `classes` or `classes_per_client` (see
      `find_parameter_name`).

    Raises:
      ConfigError: if the scheme is unknown.

    Example:
      >>> from fedjax_het import data
      >>> data.get_partition_parameters("dirichlet")
      {'alpha': REQUIRED}
    """
    return PARTITIONS.require(name).parameters


def find_parameter_name(name: str, setting: str) -> str | None:
    """Find the name of a setting among the parameters of a partition scheme.

    Args:
      name: name of the scheme, one of `PARTITIONS`.
      setting: name of the setting, e.g. "alpha" or "classes".

    Returns:
      The name of the parameter, or None if the scheme has no such parameter.

    Raises:
      ConfigError: if the scheme is unknown.

    Example:
      >>> from fedjax_het import data
      >>> data.find_parameter_name("classes_per_client", "classes")
      'classes_per_client'
    """
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
    """Register a partition scheme of the user for runs, sweeps and reports, until the process ends.

    A parameter `alpha` or `classes` receives the setting of that name. The return value of `split`
    is checked at every call. `PartitionScheme` documents the functions.

    Args:
      name: name of the scheme in settings.
      split: function that divides the examples.
      description: one line for `fedjax-het list`. Default: the first line of the docstring of
        `split`.
      setting: function that checks the parameters and sets missing ones, or None
        (`PartitionScheme.resolve_parameters`).
      mixtures: function that returns the class proportions of the clients, or None.
      clients_are_domains: whether client k holds only examples of domain k.

    Raises:
      ConfigError: if the name belongs to a scheme of the package or is not an identifier.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import data
      >>> def stripes(rng, labels, num_classes, num_clients, *, first=0):
      ...     return [np.arange(first + k, len(labels), num_clients) for k in range(num_clients)]
      >>> data.register_partition("stripes", stripes)
      >>> labels = np.zeros(6, int)
      >>> data.make_partition("stripes", labels, 2, num_clients=2, seed=0, first=1).indices
      array([1, 3, 5, 2, 4])
    """
    text = description or get_summary_line(split)
    PARTITIONS.add(PartitionScheme(name, split, text, setting, mixtures, clients_are_domains))
