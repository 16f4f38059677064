"""PFLlib's pathological setting: a few classes for each client, in parts of unequal size."""

import numpy as np

from fedjax_het.data.sampling import shuffle_by_class, take_quota
from fedjax_het.utils.config import NonNegativeInt, PositiveInt
from fedjax_het.utils.errors import ConfigError, display_name, require

_SMALLEST_SHARE = 0.1  # of the equal part of a class, as in PFLlib's code


def pathological_unequal(
    rng,
    labels,
    num_classes,
    num_clients,
    *,
    classes_per_client: PositiveInt = 2,
    min_size: NonNegativeInt = 30,
):
    """Assign two classes to each client, in random parts of unequal size (PFLlib).

    Source: `separate_data` with partition "pat" in PFLlib's public code (Apache-2.0), which creates
    the pathological setting of its leaderboard. Class after class, in the order of labels, the
    first m = ceil(K * classes_per_client / C) clients with fewer than `classes_per_client` classes
    share the class. With 20 clients and 10 classes, clients 0 to 3 therefore hold the classes 0 and
    1, clients 4 to 7 the classes 2 and 3, and so on.

    The m - 1 first clients of a class with n examples receive integers drawn uniformly from
    [n / 10m, n / m). The last client receives the rest, at least n / m examples, so the last client
    of a group is the largest. A part has at least min(min_size, N / 2K) / C examples. Classes that
    no client needs stay unused. The last clients hold fewer classes if none is left.

    Departures from the code: the examples of a class are shuffled before they are cut. The code
    counts test examples as well: its smallest size of 40 corresponds to 30 training examples after
    the split into 75 % and 25 %. A part has at least one example. Classes without examples do not
    count.

    Args:
      rng: NumPy Generator.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes, C.
      num_clients: number of clients, K.
      classes_per_client: number of classes of a client.
      min_size: a part has at least min_size / C examples, or N / 2KC if this is less.

    Returns:
      Positions in the training set, an array for each client.

    Raises:
      ConfigError: if there are fewer classes, or if a class has too few examples for its clients.
    """
    class_sizes = np.bincount(labels, minlength=num_classes)
    classes = np.flatnonzero(class_sizes)
    expected = f"at most the number of classes with examples, {len(classes)}"
    require(classes_per_client <= len(classes), "classes_per_client", classes_per_client, expected)
    clients_per_class = -(-num_clients * classes_per_client // len(classes))
    smallest = min(min_size, len(labels) / num_clients / 2) / len(classes)
    counts = np.zeros((num_classes, num_clients), np.int64)
    num_missing = np.full(num_clients, classes_per_client)
    for label in classes:
        clients = np.flatnonzero(num_missing)[:clients_per_class]
        if not len(clients):
            break
        equal_part = class_sizes[label] / len(clients)
        low = max(1, int(max(_SMALLEST_SHARE * equal_part, smallest)))
        if len(clients) > 1 and low >= int(equal_part):
            raise ConfigError(
                f"{display_name('num_clients')} = {num_clients}: class {label} has "
                f"{class_sizes[label]} examples for {len(clients)} clients with parts of at least "
                f"{low}; use fewer clients, fewer classes for each or a smaller min_size"
            )
        counts[label, clients[:-1]] = rng.integers(low, int(equal_part), len(clients) - 1)
        counts[label, clients[-1]] = class_sizes[label] - counts[label].sum()
        num_missing[clients] -= 1
    pools = shuffle_by_class(rng, labels, num_classes)
    # `take_quota` gives the rest of a class to the last client.
    used_pools = [pool[:size] for pool, size in zip(pools, counts.sum(1), strict=True)]
    return take_quota(used_pools, counts)
