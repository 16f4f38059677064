"""Clients that are set apart: they take no part in training."""

import dataclasses

import numpy as np

from fedjax_het.common.errors import require
from fedjax_het.data.partition import Partition

# A stream of their own, so that who is held out does not depend on how a partition was drawn.
_HELD_OUT_STREAM = 0x4E1D


def draw_held_out_clients(partition: Partition, count: int, seed: int) -> np.ndarray:
    """Which of all clients are held out, ascending: drawn with the seed from those that hold
    examples. Raises ConfigError where there are no more of these than are to be held out."""
    eligible = np.flatnonzero(partition.sizes)
    max_count = len(eligible) - 1
    require(
        count <= max_count,
        "held_out_clients",
        count,
        f"at most {max_count} of {len(eligible)} that have data",
    )
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_HELD_OUT_STREAM,)))
    return np.sort(rng.choice(eligible, count, replace=False))


def select_clients(partition: Partition, clients: np.ndarray) -> Partition:
    """The same of these clients alone, which are numbered anew in this order."""
    client_indices = [partition.client_indices(int(k)) for k in clients]
    names = tuple(partition.client_names[int(k)] for k in clients if partition.client_names)
    return dataclasses.replace(
        partition,
        indices=np.concatenate(client_indices),
        offsets=np.concatenate([[0], np.cumsum([len(indices) for indices in client_indices])]),
        client_names=names,
    )
