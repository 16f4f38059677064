"""Partition schemes that the setting `partition` names: functions that divide training examples.

A scheme is a function `(rng, labels, num_classes, num_clients, *, parameters...) -> clients` and an
entry in `PARTITIONS`. The function returns an array of positions for each client. The schemes are
different benchmarks and have different names. Every scheme terminates: a scheme that may find no
split raises an error that gives the reason.
"""

import bisect
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_het.data.grouped_partition import (
    compute_grouped_mixtures,
    grouped,
    resolve_grouped_parameters,
)
from fedjax_het.data.natural_partition import natural
from fedjax_het.data.sampling import allocate_equal_counts, shuffle_by_class, take_quota
from fedjax_het.data.unequal_partition import pathological_unequal
from fedjax_het.utils.array_validation import validate_labels
from fedjax_het.utils.config import Bounds, NonNegativeInt, PositiveInt, validate_arguments
from fedjax_het.utils.errors import ConfigError, display_name, require
from fedjax_het.utils.registry import (
    Registry,
    format_entry,
    get_keyword_parameters,
    get_summary_line,
    validate_keyword_arguments,
)

_log = logging.getLogger("fedjax_het")

Alpha = Annotated[float, Bounds(1e-6, 1e6)]  # concentration of a Dirichlet distribution

_SINKHORN_ITERATIONS = 1000  # as in DynaFed's code

# Arguments that a scheme's function receives if its signature has them; others are parameters.
DATA_ARGUMENTS = (
    *("rng", "labels", "num_classes", "num_clients"),
    *("domains", "domain_names", "class_names", "users"),
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
        `domains` `[N]`, `domain_names`, `class_names` and `users` `[N]` of the data set; domains
        and users are None for a data set without them. All other arguments are parameters of the
        partition.
      description: one line for `fedjax-het list`.
      resolve_parameters: function `(labels, num_classes, num_clients, class_names, **parameters) ->
        parameters`, for a scheme whose defaults depend on the data. It checks the parameters and
        sets the missing ones.
      mixtures: function `(labels, num_classes, num_clients, **parameters) -> [K, C]`: the class
        proportions from which the clients draw. It is set if they are known more exactly than from
        the drawn examples.
      clients_are_domains: whether client k holds only examples of domain k of the data set. It then
        has the domain's name and is tested on the domain's test examples.
      clients_are_users: whether each client holds only examples of one user of the data set. It
        then has the user's name and is tested on the user's test examples.
      needs_classes: whether the scheme divides classes; otherwise it works for every task.

    Example:
      >>> from fedjax_het.data import PARTITIONS
      >>> PARTITIONS["dirichlet_capped"].parameters
      {'alpha': REQUIRED, 'min_size': 10, 'max_draws': 1000}
    """

    name: str
    split: Callable[..., Any]
    description: str = ""
    resolve_parameters: Callable[..., dict[str, Any]] | None = None
    mixtures: Callable[..., np.ndarray] | None = None
    clients_are_domains: bool = False
    clients_are_users: bool = False
    needs_classes: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of `split` other than the data, by name, with their default or `REQUIRED`."""
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
        owner, accepted = f"partition {self.name!r}", self.parameters
        return validate_keyword_arguments(
            *(owner, parameters, self.split, accepted, "parameter"), available=DATA_ARGUMENTS
        )

    def __repr__(self) -> str:
        return format_entry(self)


def iid(rng, labels, num_classes, num_clients):
    """Cut a random permutation of the examples into equal parts; sizes differ by at most one.

    Args:
      rng: NumPy Generator.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.

    Returns:
      Positions in the training set, an array for each client.
    """
    return np.array_split(rng.permutation(len(labels)), num_clients)


def dirichlet(rng, labels, num_classes, num_clients, *, alpha: Alpha):
    """Split each class by Dir(alpha): label skew; sizes are very unequal and may be 0.

    Source: Hsu et al., arXiv 1909.06335, in its common per-class form. Each class is shuffled and
    cut in proportions drawn from Dir(alpha * 1_K). Sizes are very unequal and clients may be empty,
    the more so the smaller alpha is.

    Args:
      rng: NumPy Generator.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.
      alpha: concentration of the Dirichlet distribution, > 0.

    Returns:
      Positions in the training set, an array for each client.
    """
    counts = _split_class_counts(_log_dirichlet(rng, alpha, num_classes, num_clients), labels)
    return take_quota(shuffle_by_class(rng, labels, num_classes), counts)


def dirichlet_balanced(rng, labels, num_classes, num_clients, *, alpha: Alpha):
    """Split by DynaFed's partition: Dir(alpha) label skew, clients of nearly equal size.

    Source: the public code of DynaFed. Draws a C x K matrix whose rows follow Dir(alpha * 1_K).
    Columns and then rows are divided by their sums, 1000 times (Sinkhorn). The rows then sum to 1
    and the columns tend to C/K. Each class is cut in dataset order, not shuffled, at
    floor(cumulative proportion * n_class).

    The floors leave the remainder to the last client, which is therefore the largest and holds
    single examples of many classes. For 80 clients the others hold 625 examples, and the last one
    about 700 of CIFAR-100 or 634 of CIFAR-10. For alpha < 0.001, 1000 iterations do not balance
    fully (500 to 750 examples for CIFAR-100, 450 to 1000 for CIFAR-10, at 0.0001). The matrix
    balances numbers of classes, not of examples: if classes have unequal sizes, clients are as
    unequal as their classes. With classes of 500, 500, 5 and 5 examples, 80 clients and alpha 0.01,
    a third of the clients hold no example.

    Departures from the code: the matrix is drawn and balanced in logarithms, where no draw
    underflows to zero (a zero column could not be scaled). The generator is
    `numpy.random.Generator`. Cost: 0.03 s for 10 classes and 80 clients, 0.1 s for 100 classes.

    Args:
      rng: NumPy Generator.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.
      alpha: concentration of the Dirichlet distribution, > 0.

    Returns:
      Positions in the training set, an array for each client.
    """
    log_matrix = _log_dirichlet(rng, alpha, num_classes, num_clients)
    for _ in range(_SINKHORN_ITERATIONS):
        log_matrix -= _logsumexp(log_matrix, axis=0)
        log_matrix -= _logsumexp(log_matrix, axis=1)
    classes = [np.flatnonzero(labels == label) for label in range(num_classes)]
    return take_quota(classes, _split_class_counts(log_matrix, labels))


def dirichlet_capped(
    rng,
    labels,
    num_classes,
    num_clients,
    *,
    alpha: Alpha,
    min_size: NonNegativeInt = 10,
    max_draws: PositiveInt = 1000,
):
    """Split by Dir(alpha) with sizes from min_size to little above N/K (MOON, NIID-Bench, FedAF).

    Source: the public code of MOON and NIID-Bench; FedAF and FedDM use this partition. Class after
    class, proportions are drawn from Dir(alpha * 1_K). A client that already holds N / K examples
    or more receives none of the next class. The whole draw is repeated until every client holds
    `min_size` examples, at most `max_draws` times (the public code repeats without limit).

    Departure from the code: proportions are drawn in logarithms, so that the proportions of clients
    below the cap never all underflow to zero.

    Args:
      rng: NumPy Generator.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.
      alpha: concentration of the Dirichlet distribution, > 0.
      min_size: smallest number of examples of a client, at most N / K.
      max_draws: largest number of draws.

    Returns:
      Positions in the training set, an array for each client.

    Raises:
      ConfigError: if no draw is accepted.
    """
    max_min_size = len(labels) // num_clients
    expected = f"at most {max_min_size}: {len(labels)} examples for {num_clients} clients"
    require(min_size <= max_min_size, "min_size", min_size, expected)
    class_sizes = np.bincount(labels, minlength=num_classes)
    largest_minimum, fewest_short_clients = 0, num_clients
    for _ in range(max_draws):
        counts = np.zeros((num_classes, num_clients), np.int64)
        log_proportions = _log_dirichlet(rng, alpha, num_classes, num_clients)
        for label in range(num_classes):
            is_full = counts.sum(0) >= len(labels) / num_clients
            if is_full.all():  # all examples are assigned, and the other classes have none
                break
            row = np.where(is_full, -np.inf, log_proportions[label])
            counts[label] = _split_counts(row, class_sizes[label])
        sizes = counts.sum(0)
        if sizes.min() >= min_size:
            return take_quota(shuffle_by_class(rng, labels, num_classes), counts)
        largest_minimum = max(largest_minimum, int(sizes.min()))
        fewest_short_clients = min(fewest_short_clients, int((sizes < min_size).sum()))
    raise ConfigError(
        f"{display_name('alpha')} = {alpha!r}: none of {max_draws} draws of 'dirichlet_capped' "
        f"gave each of {num_clients} clients min_size = {min_size} examples (over all draws, at "
        f"least {fewest_short_clients} clients had fewer, and the smallest had at most "
        f"{largest_minimum}); use a larger alpha, fewer clients, a smaller min_size, or "
        "'dirichlet_balanced'"
    )


def classes_per_client(rng, labels, num_classes, num_clients, *, classes_per_client: PositiveInt):
    """Assign exactly C labels to every client, in equal numbers (FSL's n_i / C samples of each).

    A shard holds examples of one label for one client. All shards have one size, the largest for
    which the classes can be cut into K * C shards. Labels are assigned to numbers of clients that
    are as equal as the class sizes allow. If K * C / num_classes is not an integer, the labels with
    one more client are drawn at random. Clients, in random order, receive the labels with most
    shards left, with ties broken at random; shards never run out. The examples of each label are
    shuffled.

    Examples that do not fill a shard stay unused. All examples are used if the classes have one
    size that K * C / num_classes divides, as in FSL's settings. Every label is used if K * C >=
    num_classes; otherwise a random choice of labels is used.

    Args:
      rng: NumPy Generator.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes.
      num_clients: number of clients, K.
      classes_per_client: number of labels of each client, C.

    Returns:
      Positions in the training set, an array for each client.

    Raises:
      ConfigError: if the data have fewer than C classes, or too few examples for K * C shards.
    """
    per_client = classes_per_client
    class_sizes = np.bincount(labels, minlength=num_classes)
    num_present = int((class_sizes > 0).sum())
    expected = f"at most the number of classes with examples, {num_present}"
    require(per_client <= num_present, "classes_per_client", per_client, expected)
    num_shards = num_clients * per_client
    shard_size = _find_largest_shard_size(class_sizes, num_clients, num_shards)
    if shard_size == 0:
        raise ConfigError(
            f"{display_name('classes_per_client')} = {per_client}: {num_clients} clients need "
            f"{num_shards} shards of at least one example, but there are {len(labels)} examples "
            f"in {num_present} classes; use fewer clients or fewer classes for each"
        )
    max_shards = np.minimum(class_sizes // shard_size, num_clients)
    shards_left = allocate_equal_counts(rng, max_shards, num_shards)
    num_unused = len(labels) - num_shards * shard_size
    if num_unused > len(labels) // 10:
        _log.warning(
            "classes_per_client leaves %d of %d examples unused: %d shards of %d",
            num_unused,
            len(labels),
            num_shards,
            shard_size,
        )

    pools = shuffle_by_class(rng, labels, num_classes)
    shards_used = np.zeros(num_classes, np.int64)
    clients = [None] * num_clients
    for client in rng.permutation(num_clients):
        client_classes = np.lexsort((rng.random(num_classes), -shards_left))[:per_client]
        starts = shards_used[client_classes] * shard_size
        shards = zip(client_classes, starts, strict=True)
        clients[client] = np.concatenate([pools[c][i : i + shard_size] for c, i in shards])
        shards_left[client_classes] -= 1
        shards_used[client_classes] += 1
    return clients


def pathological(rng, labels, num_classes, num_clients):
    """Assign two classes to each client: FedAMP's pathological setting.

    The paper follows McMahan et al. (arXiv 1602.05629). They cut the examples sorted by label into
    two shards for each client; some shards contain two labels. Here every client has exactly two
    classes, in equal numbers, as FedAMP's text says. Equals `classes_per_client` with two classes.

    Args:
      rng: NumPy Generator.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.

    Returns:
      Positions in the training set, an array for each client.
    """
    return classes_per_client(rng, labels, num_classes, num_clients, classes_per_client=2)


def by_domain(rng, labels, num_classes, num_clients, *, domains, domain_names):
    """Assign all examples of domain k to client k (FedBN's and FedAF's feature skew).

    Nothing is drawn.

    Args:
      rng: not used.
      labels: training labels, integers `[N]`.
      num_classes: not used.
      num_clients: number of clients, equal to the number of domains.
      domains: domain of each example, integers `[N]`, positions in `domain_names`; or None.
      domain_names: name of each domain. Default: the largest domain determines their number.

    Returns:
      Positions in the training set, an array for each client.

    Raises:
      ConfigError: if the data set has no domains, if the numbers of clients and domains differ, or
        if a domain has no training examples.
    """
    require(domains is not None, "partition", "by_domain", "a data set whose examples have domains")
    domains = validate_labels("domains", domains, "labels", labels, "domain")
    count = max(len(domain_names), int(domains.max()) + 1)
    require(num_clients == count, "num_clients", num_clients, f"{count}, one for each domain")
    clients = [np.flatnonzero(domains == domain) for domain in range(count)]
    for domain, client in enumerate(clients):
        name = domain_names[domain] if domain < len(domain_names) else domain
        require(len(client) > 0, f"training examples of {name!r}", 0, "at least one")
    return clients


def compute_iid_mixtures(labels, num_classes, num_clients):
    """Compute the class proportions of the whole training set, equal for every client.

    Args:
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.

    Returns:
      Proportions, float64 `[K, C]`.
    """
    proportions = np.bincount(labels, minlength=num_classes) / len(labels)
    return np.tile(proportions, (num_clients, 1))


def _log_dirichlet(rng, alpha, rows: int, num_clients: int) -> np.ndarray:
    """Draw the logarithms of `rows` samples of Dir(alpha * 1_K), `[rows, K]`.

    The values are finite for every positive alpha: G(alpha) ~ G(alpha + 1) * U^(1 / alpha), so log
    G needs no number near zero.
    """
    shape = (rows, num_clients)
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0, shape))
    # random() is in [0, 1); one minus it is never zero.
    log_gamma += np.log(1.0 - rng.random(shape)) / alpha
    return log_gamma - _logsumexp(log_gamma, axis=1)


def _logsumexp(values: np.ndarray, axis: int) -> np.ndarray:
    largest = values.max(axis=axis, keepdims=True)
    return largest + np.log(np.exp(values - largest).sum(axis=axis, keepdims=True))


def _split_counts(log_proportions: np.ndarray, count: int) -> np.ndarray:
    """Split `count` examples into `[K]` parts: differences of floor(cumulative proportion * count).

    As in the public code, the floor is one short if the proportions of the clients up to an end sum
    to 1 minus a rounding error. The example goes to the last client. The classes affected depend
    on the last bit, and exponentials differ there between machines. Proportions are therefore
    rounded to single precision, and only exactly defined operations follow.
    """
    proportions = np.exp(log_proportions - log_proportions.max()).astype(np.float32)
    proportions = proportions.astype(np.float64)
    proportions /= proportions.sum()
    boundaries = np.floor(np.cumsum(proportions) * count).astype(np.int64)
    boundaries[-1] = count
    return np.diff(np.minimum(boundaries, count), prepend=0)


def _split_class_counts(log_proportions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Convert log proportions `[C, K]` to numbers of examples of each class and client."""
    sizes = np.bincount(labels, minlength=len(log_proportions))
    return np.stack(
        [_split_counts(row, int(size)) for row, size in zip(log_proportions, sizes, strict=True)]
    )


def _find_largest_shard_size(class_sizes: np.ndarray, num_clients: int, num_shards: int) -> int:
    """Return the largest shard size for `num_shards` shards, at most one per class and client.

    Returns 0 if shards of one example do not suffice. If the number of shards is at least the
    number of classes, every class is used, so the smallest class bounds the size.
    """
    sizes = class_sizes[class_sizes > 0]
    largest = int(sizes.min() if num_shards >= len(sizes) else sizes.max())

    def has_too_few_shards(size: int) -> bool:
        return np.minimum(class_sizes // size, num_clients).sum() < num_shards

    return bisect.bisect(range(1, largest + 1), False, key=has_too_few_shards)


def _describe(split: Callable[..., Any], **fields: Any) -> PartitionScheme:
    """Describe a scheme of the package by its function's name and docstring."""
    return PartitionScheme(split.__name__, split, get_summary_line(split), **fields)


PARTITIONS: Registry[PartitionScheme] = Registry(
    "partition",
    (
        _describe(iid, mixtures=compute_iid_mixtures),
        _describe(dirichlet, needs_classes=True),
        _describe(dirichlet_balanced, needs_classes=True),
        _describe(dirichlet_capped, needs_classes=True),
        _describe(classes_per_client, needs_classes=True),
        _describe(pathological, needs_classes=True),
        _describe(pathological_unequal, needs_classes=True),
        _describe(
            grouped,
            needs_classes=True,
            resolve_parameters=resolve_grouped_parameters,
            mixtures=compute_grouped_mixtures,
        ),
        _describe(by_domain, clients_are_domains=True),
        _describe(natural, clients_are_users=True),
    ),
)
"""Partition schemes by name, including entries that users registered.

Example:
  >>> from fedjax_het.data import PARTITIONS
  >>> PARTITIONS["iid"].description
  'Cut a random permutation of the examples into equal parts; sizes differ by at most one'
"""


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
      >>> from fedjax_het.data import find_parameter_name
      >>> find_parameter_name("classes_per_client", "classes")
      'classes_per_client'
    """
    parameters = PARTITIONS.require(name).parameters
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
      >>> from fedjax_het import make_partition, register_partition
      >>> def stripes(rng, labels, num_classes, num_clients, *, first=0):
      ...     return [np.arange(first + k, len(labels), num_clients) for k in range(num_clients)]
      >>> register_partition("stripes", stripes)
      >>> labels = np.zeros(6, int)
      >>> make_partition("stripes", labels, 2, num_clients=2, seed=0, first=1).indices
      array([1, 3, 5, 2, 4])
    """
    text = description or get_summary_line(split)
    PARTITIONS.add(PartitionScheme(name, split, text, setting, mixtures, clients_are_domains))
