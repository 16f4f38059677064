"""FedAMP's practical non-IID setting: groups of clients with a few dominating classes each."""

import logging
from collections.abc import Sequence

import numpy as np

from fedjax_het.data.sampling import shuffle_by_class, systematic_round, take_quota
from fedjax_het.utils.config import NonNegativeInt, PositiveInt, UnitInterval
from fedjax_het.utils.errors import ConfigError, display_name, require

_log = logging.getLogger("fedjax_het")

# Training examples of a client of the 1st, 2nd and 3rd group; further groups repeat them.
_DEFAULT_GROUP_SIZES = (1000, 700, 400)
_DEFAULT_NUM_GROUPS = 5
# The 20 superclasses of CIFAR-100 and their classes, as its authors publish them.
CIFAR100_SUPERCLASSES = {
    "aquatic mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit and vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household electrical devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large man-made outdoor things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large natural outdoor scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large omnivores and herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium-sized mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles 1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles 2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}


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
    """Split into groups of clients with dominating classes, 80 % of their data (FedAMP).

    Source: the practical non-IID setting of Huang et al., AAAI 2021, section 7. A fraction
    `dominating_share` of a client's data is spread evenly over the dominating classes of its group,
    and the rest evenly over all other classes. Clients are ordered by group: the first clients
    belong to the first group.

    With 62 clients of EMNIST ByClass the defaults are the paper's. Clients 0-9 hold 1000 examples,
    800 of them digits. Clients 10-35 hold 700, 560 of them upper-case letters. Clients 36-61 hold
    400, 320 of them lower-case letters. The paper can be read as 1000, 700 and 400 *dominating*
    examples; here these numbers are totals, as its 100 test examples are a total. The paper's
    settings for other data sets are in an appendix that could not be read. Their groups and sizes
    are choices of this package.

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
        letters if class names are single characters (EMNIST), or the 20 superclasses of CIFAR-100.
        Otherwise there are five groups of neighboring labels (two labels each for ten classes).
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
    # `resolve_grouped_parameters` has set the defaults.
    assert group_sizes is not None and clients_per_group is not None
    rows = _compute_group_mixtures(num_classes, groups, dominating_share)
    groups_of_clients = np.repeat(np.arange(len(rows)), clients_per_group)
    counts = np.stack(
        [systematic_round(rng, rows[g], group_sizes[g]) for g in groups_of_clients], axis=1
    )
    num_requested, num_available = counts.sum(1), np.bincount(labels, minlength=num_classes)
    scarcest = int((num_requested - num_available).argmax())
    if num_requested[scarcest] > num_available[scarcest]:
        raise ConfigError(
            f"{display_name('group_sizes')} = {group_sizes!r}: clients need "
            f"{num_requested[scarcest]} examples of class {scarcest}, which has "
            f"{num_available[scarcest]}: expected smaller sizes or fewer clients"
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
    return np.repeat(
        _compute_group_mixtures(num_classes, groups, dominating_share), clients_per_group, axis=0
    )


def _compute_group_mixtures(num_classes: int, groups, dominating_share: float) -> np.ndarray:
    """Compute the class proportions of each group, `[G, C]`."""
    rows = np.zeros((len(groups), num_classes))
    for row, group in zip(rows, groups, strict=True):
        row[:] = (1 - dominating_share) / max(num_classes - len(group), 1)
        row[group] = dominating_share / len(group)
    return rows


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
    expected = "at least 2, so that clients can learn from each other"
    require(num_clients >= 2, "num_clients", num_clients, expected)
    if groups is None:
        groups = _default_groups(num_classes, class_names)
    require(len(groups) >= 1, "groups", groups, "at least one group")
    for position, group in enumerate(groups):
        name = f"groups[{position}]"
        require(len(group) >= 1, name, group, "at least one class")
        require(max(group) < num_classes, name, group, f"classes in [0, {num_classes})")
        require(len(set(group)) == len(group), name, group, "each class once")
        expected = f"fewer than all {num_classes} classes, or dominating_share = 1"
        require(dominating_share == 1 or len(group) < num_classes, name, group, expected)
    expected = f"at least {len(groups)}, one for each group"
    require(num_clients >= len(groups), "num_clients", num_clients, expected)
    if clients_per_group is None:
        clients_per_group = _apportion([len(group) for group in groups], num_clients)
    _require_length("clients_per_group", clients_per_group, len(groups))
    expected = f"a sum of num_clients = {num_clients}"
    is_valid = sum(clients_per_group) == num_clients
    require(is_valid, "clients_per_group", clients_per_group, expected)
    if group_sizes is None:
        rows = _compute_group_mixtures(num_classes, groups, dominating_share)
        num_available = np.bincount(labels, minlength=num_classes)
        group_sizes = _find_feasible_sizes(rows, np.asarray(clients_per_group), num_available)
    _require_length("group_sizes", group_sizes, len(groups))
    return {
        "groups": groups,
        "clients_per_group": clients_per_group,
        "dominating_share": float(dominating_share),
        "group_sizes": group_sizes,
    }


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


def _require_length(argument: str, numbers: list[int], num_groups: int) -> None:
    expected = f"{num_groups} whole numbers >= 1, one for each group"
    require(len(numbers) == num_groups, argument, numbers, expected)


def _find_feasible_sizes(
    rows: np.ndarray, clients_per_group: np.ndarray, num_available: np.ndarray
) -> list[int]:
    """Return the default sizes times the largest integer percentage that the classes supply."""
    default_sizes = np.resize(_DEFAULT_GROUP_SIZES, len(clients_per_group))
    num_clients = clients_per_group.sum()
    for percent in range(100, 0, -1):
        sizes = default_sizes * percent // 100
        max_requested = clients_per_group @ np.ceil(np.round(rows * sizes[:, None], 9))
        if (max_requested <= num_available).all():
            if percent < 100:
                _log.warning(
                    "'grouped': sizes scaled to %d %%, %s examples for each client, the largest "
                    "that %d clients and %d examples allow",
                    percent,
                    ", ".join(map(str, sizes[: len(_DEFAULT_GROUP_SIZES)])),
                    num_clients,
                    num_available.sum(),
                )
            return sizes.tolist()
    scarcest = int((num_available - max_requested).argmin())
    raise ConfigError(
        f"{display_name('num_clients')} = {num_clients}: even one percent of the default sizes "
        f"needs more of class {scarcest} than its {num_available[scarcest]} examples; use fewer "
        "clients or set group_sizes"
    )
