"""FedAMP's practical setting: groups of clients whose data a few dominating classes make up."""

import logging
from collections.abc import Sequence

import numpy as np

from fedjax_het.data.quota_sampling import shuffle_by_class, systematic_round, take_quota
from fedjax_het.data.sources.cifar100 import CIFAR100_SUPERCLASSES
from fedjax_het.utils.config import NonNegativeInt, PositiveInt, UnitInterval
from fedjax_het.utils.errors import ConfigError, is_integer_at_least, require

_log = logging.getLogger(__name__)

_DEFAULT_GROUP_SIZES = (
    1000,
    700,
    400,
)  # training examples of a client of the 1st, 2nd, 3rd, 4th... group
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
    """FedAMP's practical non-IID setting (Huang et al., AAAI 2021, section 7).

    Of a client's data, `dominating_share` is spread evenly over its group's dominating classes,
    the rest evenly over all other classes. Groups follow each other: the first clients are those
    of the first group.

    groups: for each group the list of its dominating classes. Default: of classes that are single
        characters, digits, upper and lower case (EMNIST); of CIFAR-100, its 20 superclasses; else
        five groups of neighbouring labels (two each of ten classes).
    clients_per_group: default: in proportion to the numbers of dominating classes.
    group_sizes: training examples of a client of each group, its total. Default: 1000, 700, 400,
        1000, ...; all scaled down by the same whole percentage, told in a warning, where the data
        do not suffice.

    62 clients of EMNIST ByClass then are the paper's: clients 0-9 with 1000 examples, 800 of them
    digits; 10-35 with 700, 560 of them upper-case; 36-61 with 400, 320 of them lower-case. The
    paper can be read as 1000, 700 and 400 *dominating* ones; totals are taken, as its 100 test
    examples are a total. What it used for other data sets is in an appendix that could not be
    read: those groups and sizes are declared here, not reproduced.

    Numbers per class are as equal as whole numbers allow, and which classes get one more is
    drawn: so every client whose data suffice has all classes, as the paper says, which independent
    draws would not give to small ones. No example has two owners; most may have none.

    Raises `ConfigError` for a group without classes and for more examples than a class has.
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
            f"group_sizes = {group_sizes!r}: clients ask for {num_requested[scarcest_class]} examples of class "
            f"{scarcest_class}, which has {num_available[scarcest_class]}: expected smaller sizes or fewer clients"
        )
    # What is left of a class is a last run that nobody gets.
    counts = np.column_stack([counts, num_available - num_requested])
    return take_quota(shuffle_by_class(rng, labels, num_classes), counts)[:-1]


def compute_grouped_mixtures(
    labels, num_classes, num_clients, *, groups, clients_per_group, dominating_share, **_
) -> np.ndarray:
    """[K, C] class proportions of the clients, by their groups."""
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
    """The parameters of `grouped`, checked, with the defaults for these data filled in."""
    require(num_clients >= 2, "num_clients", num_clients, "at least 2, to learn from each other")
    groups = _validate_groups(groups, num_classes, class_names)
    for position, group in enumerate(groups):
        require(
            dominating_share == 1 or len(group) < num_classes,
            f"groups[{position}]",
            group,
            f"not all {num_classes} classes, or dominating_share = 1: a rest is drawn from others",
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
        raise ConfigError(f"groups = {groups!r}: expected a list of classes for each") from None
    require(len(groups) >= 1, "groups", groups, "at least one group")
    for position, group in enumerate(groups):
        name = f"groups[{position}]"
        require(len(group) >= 1, name, group, "at least one class")
        for label in group:
            ok = is_integer_at_least(label, 0) and label < num_classes
            require(ok, name, group, f"classes in [0, {num_classes})")
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
    """Whole numbers >= 1 that sum to `total`, as `weights`; exactly so where these divide it."""
    counts = np.ones(len(weights), np.int64)
    for _ in range(total - len(weights)):  # the highest average takes the next one
        counts[np.argmax(weights / (counts + 1))] += 1
    return counts.tolist()


def _validate_positive_ints(argument: str, values, count: int) -> list[int]:
    try:
        values = list(values)
    except TypeError:
        values = [values]
    ok = len(values) == count and all(is_integer_at_least(number, 1) for number in values)
    require(ok, argument, values, f"{count} whole numbers >= 1, one for each group")
    return [int(number) for number in values]


def _find_feasible_sizes(labels, num_classes: int, num_clients: int, parameters: dict) -> list[int]:
    """The tiers, times the largest whole percentage at which no draw asks for too much."""
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
                    "'grouped': sizes scaled to %d %%, %s examples for each client, as %d clients "
                    "of %d examples allow no more",
                    percent,
                    ", ".join(map(str, sizes[: len(_DEFAULT_GROUP_SIZES)])),
                    num_clients,
                    len(labels),
                )
            return sizes.tolist()
    scarcest_class = int((num_available - max_requested).argmin())
    raise ConfigError(
        f"num_clients = {num_clients}: even one percent of the default sizes asks for more of "
        f"class {scarcest_class} than its {num_available[scarcest_class]} examples; use fewer clients or give "
        "group_sizes"
    )
