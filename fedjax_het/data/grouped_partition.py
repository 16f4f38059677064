"""FedAMP's practical non-IID setting: groups of clients with a few dominating classes each."""

import logging
from collections.abc import Sequence

import numpy as np

from fedjax_het.data.quota_sampling import shuffle_by_class, systematic_round, take_quota
from fedjax_het.data.sources.cifar100 import CIFAR100_SUPERCLASSES
from fedjax_het.utils.config import NonNegativeInt, PositiveInt, UnitInterval
from fedjax_het.utils.errors import ConfigError, is_integer_at_least, require

_log = logging.getLogger(__name__)

# Training examples of a client of the 1st, 2nd and 3rd group; further groups repeat them.
_DEFAULT_GROUP_SIZES = (1000, 700, 400)
_DEFAULT_NUM_GROUPS = 5


def grouped(
    rng,
    labels,
    num_classes,
    num_clients,
    *,
    groups: tuple[tuple[NonNegativeInt, ...], ...] | None = None,
    clients_per_group: tuple[PositiveInt, ...] | None = None,
    group_sizes: tuple[PositiveInt, ...] | None = None,
    dominating_share: UnitInterval = 0.8,
):
    """Split examples by FedAMP's practical non-IID setting (Huang et al., AAAI 2021, section 7).

    A fraction `dominating_share` of a client's data is spread evenly over the dominating classes of
    its group, and the rest evenly over all other classes. Clients are ordered by group: the first
    clients belong to the first group.

    With 62 clients of EMNIST ByClass the defaults are the paper's: clients 0-9 hold 1000 examples,
    800 of them digits; clients 10-35 hold 700, 560 of them upper-case letters; clients 36-61 hold
    400, 320 of them lower-case letters. The paper can be read as 1000, 700 and 400 *dominating*
    examples; here these numbers are totals, as its 100 test examples are a total. The settings for
    other data sets are in an appendix that could not be read: their groups and sizes are choices of
    this package, not reproduced ones.

    The numbers per class are as equal as integers allow; the classes with one more example are
    drawn. Every client with enough examples therefore has all classes, as the paper says;
    independent draws would leave small clients without some classes. No example belongs to two
    clients, and most examples may belong to none.

    Args:
      rng: NumPy Generator.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.
      groups: the dominating classes of each group. Default: digits, upper-case and lower-case
        letters if class names are single characters (EMNIST); the 20 superclasses of CIFAR-100;
        otherwise five groups of neighboring labels (two labels each for ten classes).
      clients_per_group: number of clients of each group. Default: in proportion to the numbers of
        dominating classes.
      group_sizes: total number of training examples of a client of each group. Default: 1000, 700,
        400, 1000, ...; if the data do not suffice, all are reduced to the same integer percentage,
        and a warning reports it.
      dominating_share: fraction of a client's data in the dominating classes of its group, in [0,
        1].

    Returns:
      Positions in the training set, an array for each client.

    Raises:
      ConfigError: if a group has no classes, or if clients need more examples than a class has.
    """
    mixtures = compute_grouped_mixtures(
        labels,
        num_classes,
        num_clients,
        groups=groups,
        clients_per_group=clients_per_group,
        dominating_share=dominating_share,
    )
    assert group_sizes is not None and clients_per_group is not None, (
        "see `resolve_grouped_parameters`"
    )
    sizes = np.repeat(group_sizes, clients_per_group)
    counts = np.stack(
        [systematic_round(rng, row, size) for row, size in zip(mixtures, sizes, strict=True)],
        axis=1,
    )
    num_requested, num_available = counts.sum(1), np.bincount(labels, minlength=num_classes)
    if (num_requested > num_available).any():
        scarcest_class = int((num_requested - num_available).argmax())
        raise ConfigError(
            f"group_sizes = {group_sizes!r}: clients need {num_requested[scarcest_class]} examples of class "
            f"{scarcest_class}, which has {num_available[scarcest_class]}: expected smaller sizes or fewer clients"
        )
    # A last column takes the remaining examples of each class, which no client holds.
    counts = np.column_stack([counts, num_available - num_requested])
    return take_quota(shuffle_by_class(rng, labels, num_classes), counts)[:-1]


def compute_grouped_mixtures(
    labels, num_classes, num_clients, *, groups, clients_per_group, dominating_share, **_
) -> np.ndarray:
    """Compute the class proportions of the clients from their groups.

    Args:
      labels: training labels; not used.
      num_classes: number of classes, C.
      num_clients: number of clients, K; not used.
      groups: the dominating classes of each group.
      clients_per_group: number of clients of each group, with sum K.
      dominating_share: fraction of a client's data in the dominating classes of its group.
      **_: other parameters of the partition; not used.

    Returns:
      Proportions, float64 `[K, C]`.
    """
    rows = np.zeros((len(groups), num_classes))
    for row, group in zip(rows, groups, strict=True):
        num_other_classes = num_classes - len(group)
        row[:] = (1 - dominating_share) / num_other_classes if num_other_classes else 0
        row[group] = dominating_share / len(group)
    return np.repeat(rows, clients_per_group, axis=0)


def resolve_grouped_parameters(
    labels,
    num_classes: int,
    num_clients: int,
    class_names: Sequence[str],
    *,
    groups,
    clients_per_group,
    group_sizes,
    dominating_share,
) -> dict:
    """Check the parameters of `grouped` and set the defaults for these data.

    Args:
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.
      class_names: name of each class, or ().
      groups: as in `grouped`, or None.
      clients_per_group: as in `grouped`, or None.
      group_sizes: as in `grouped`, or None.
      dominating_share: as in `grouped`.

    Returns:
      All four parameters by name.

    Raises:
      ConfigError: if a parameter does not fit the data or the number of clients.
    """
    require(
        num_clients >= 2,
        "num_clients",
        num_clients,
        "at least 2, so that clients can learn from each other",
    )
    groups = _validate_groups(groups, num_classes, class_names)
    for position, group in enumerate(groups):
        require(
            dominating_share == 1 or len(group) < num_classes,
            f"groups[{position}]",
            group,
            f"not all {num_classes} classes (or dominating_share = 1): the other data need other classes",
        )
    require(
        num_clients >= len(groups),
        "num_clients",
        num_clients,
        f"at least {len(groups)}, one for each group",
    )
    if clients_per_group is None:
        clients_per_group = _apportion([len(group) for group in groups], num_clients)
    clients_per_group = _validate_positive_ints("clients_per_group", clients_per_group, len(groups))
    require(
        sum(clients_per_group) == num_clients,
        "clients_per_group",
        clients_per_group,
        f"a sum of num_clients = {num_clients}",
    )
    parameters = {
        "groups": groups,
        "clients_per_group": clients_per_group,
        "dominating_share": float(dominating_share),
    }
    if group_sizes is None:
        group_sizes = _find_feasible_sizes(labels, num_classes, num_clients, parameters)
    parameters["group_sizes"] = _validate_positive_ints("group_sizes", group_sizes, len(groups))
    return parameters


def _validate_groups(groups, num_classes: int, class_names: Sequence[str]) -> list[list[int]]:
    if groups is None:
        groups = _default_groups(num_classes, class_names)
    try:
        groups = [list(group) for group in groups]
    except TypeError:
        raise ConfigError(
            f"groups = {groups!r}: expected a list of classes for each group"
        ) from None
    require(len(groups) >= 1, "groups", groups, "at least one group")
    for position, group in enumerate(groups):
        name = f"groups[{position}]"
        require(len(group) >= 1, name, group, "at least one class")
        for label in group:
            is_valid = is_integer_at_least(label, 0) and label < num_classes
            require(is_valid, name, group, f"classes in [0, {num_classes})")
        require(len(set(group)) == len(group), name, group, "each class once")
    return [[int(label) for label in group] for group in groups]


def _default_groups(num_classes: int, class_names: Sequence[str]) -> list[list[int]]:
    names = [str(name) for name in class_names]
    if names and all(len(name) == 1 for name in names):
        tests = (str.isdigit, str.isupper, str.islower)
        members = [[label for label, name in enumerate(names) if test(name)] for test in tests]
        character_groups = [labels for labels in members if labels]
        if len(character_groups) > 1 and sum(map(len, character_groups)) == num_classes:
            return character_groups
    superclasses = CIFAR100_SUPERCLASSES.values()
    if sorted(names) == sorted(name for fine in superclasses for name in fine):
        return [[names.index(name) for name in fine] for fine in superclasses]
    parts = np.array_split(np.arange(num_classes), min(_DEFAULT_NUM_GROUPS, num_classes))
    return [part.tolist() for part in parts]


def _apportion(weights: list[int], total: int) -> list[int]:
    """Divide `total` into integers >= 1 in proportion to `weights`, exactly if possible."""
    counts = np.ones(len(weights), np.int64)
    for _ in range(total - len(weights)):  # highest averages method
        counts[np.argmax(weights / (counts + 1))] += 1
    return counts.tolist()


def _validate_positive_ints(argument: str, values, count: int) -> list[int]:
    try:
        values = list(values)
    except TypeError:
        values = [values]
    is_valid = len(values) == count and all(is_integer_at_least(number, 1) for number in values)
    require(is_valid, argument, values, f"{count} whole numbers >= 1, one for each group")
    return [int(number) for number in values]


def _find_feasible_sizes(labels, num_classes: int, num_clients: int, parameters: dict) -> list[int]:
    """Return the default sizes times the largest integer percentage that the classes supply."""
    clients_per_group = np.asarray(parameters["clients_per_group"])
    mixtures = compute_grouped_mixtures(labels, num_classes, num_clients, **parameters)
    rows = mixtures[np.cumsum(clients_per_group) - 1]  # [G, C]
    num_available = np.bincount(labels, minlength=num_classes)
    default_sizes = np.resize(_DEFAULT_GROUP_SIZES, len(clients_per_group))
    for percent in range(100, 0, -1):
        sizes = default_sizes * percent // 100
        max_requested = clients_per_group @ np.ceil(np.round(rows * sizes[:, None], 9))
        if (max_requested <= num_available).all():
            if percent < 100:
                _log.warning(
                    "'grouped': sizes scaled to %d %%, %s examples for each client, the largest that %d "
                    "clients and %d examples allow",
                    percent,
                    ", ".join(map(str, sizes[: len(_DEFAULT_GROUP_SIZES)])),
                    num_clients,
                    len(labels),
                )
            return sizes.tolist()
    scarcest_class = int((num_available - max_requested).argmin())
    raise ConfigError(
        f"num_clients = {num_clients}: even one percent of the default sizes needs more of "
        f"class {scarcest_class} than its {num_available[scarcest_class]} examples; use fewer clients or set "
        "group_sizes"
    )
