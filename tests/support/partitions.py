"""Labels to divide, and parameters of partition schemes."""

import numpy as np

from fedjax_het.data import PARTITIONS
from fedjax_het.utils.registry import REQUIRED


def shuffled_labels(sizes, seed=0):
    """Return the labels of classes of these sizes, in random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def required_parameters(scheme, **values):
    """Return those of the values that a scheme has no default for."""
    defaults = PARTITIONS[scheme].parameters
    return {name: values[name] for name, default in defaults.items() if default is REQUIRED}


def group_arguments(scheme, num_examples, num_clients):
    """Return the domains or users of examples, for a scheme whose clients are such groups."""
    if PARTITIONS[scheme].clients_are_domains:
        return {"domains": np.arange(num_examples) * 3 % num_clients}
    if PARTITIONS[scheme].clients_are_users:
        return {"users": np.arange(num_examples) % (num_clients + 1)}
    return {}
