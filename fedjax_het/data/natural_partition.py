"""The natural partition: the users of a data set are the clients."""

import numpy as np

from fedjax_het.utils.errors import require


def natural(rng, labels, num_classes, num_clients, *, users):
    """Make each user of the data set a client; fewer clients are a random sample of the users.

    LEAF (Caldas et al., arXiv 1812.01097) and TensorFlow Federated divide FEMNIST by writers in
    this way. Nothing is drawn if every user is a client. Users of whom the data set has only test
    examples are no clients.

    Args:
      rng: NumPy Generator, which draws the users without replacement.
      labels: not used.
      num_classes: not used.
      num_clients: number of clients, at most the number of users.
      users: user of each example, integers or texts `[N]`; or None.

    Returns:
      Positions in the training set, an array for each client, in ascending order of the users.

    Raises:
      ConfigError: if the data set has no users, or fewer than `num_clients`.
    """
    require(users is not None, "partition", "natural", "a data set with users, see train_users")
    ids, owners = np.unique(users, return_inverse=True)
    expected = f"at most {len(ids)}, the number of users with training examples"
    require(num_clients <= len(ids), "num_clients", num_clients, expected)
    positions = split_by_group(owners, len(ids))
    return [positions[user] for user in np.sort(rng.choice(len(ids), num_clients, replace=False))]


def split_by_group(groups: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Return the positions of the examples of each group.

    Args:
      groups: group of each example, integers `[N]` in [0, num_groups).
      num_groups: number of groups, G.

    Returns:
      G arrays of positions, each ascending.
    """
    ends = np.cumsum(np.bincount(groups, minlength=num_groups))
    return np.split(np.argsort(groups, kind="stable"), ends[:-1])
