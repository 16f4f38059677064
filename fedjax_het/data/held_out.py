"""Clients that are set apart: they take no part in training."""

import dataclasses

import numpy as np

from fedjax_het.common.errors import require
from fedjax_het.data.partition import Partition

# A stream of their own, so that who is held out does not depend on how a partition was drawn.
_STREAM = 0x4E1D


def held_out_clients(partition: Partition, count: int, seed: int) -> np.ndarray:
    """Which of all clients are held out, ascending: drawn with the seed from those that hold
    examples. Raises ConfigError where there are no more of these than are to be held out."""
    able = np.flatnonzero(partition.sizes)
    most = len(able) - 1
    require(
        count <= most, "held_out_clients", count, f"at most {most} of {len(able)} that have data"
    )
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM,)))
    return np.sort(rng.choice(able, count, replace=False))


def of_clients(partition: Partition, clients: np.ndarray) -> Partition:
    """The same of these clients alone, which are numbered anew in this order."""
    held = [partition.client(int(k)) for k in clients]
    names = tuple(partition.client_names[int(k)] for k in clients if partition.client_names)
    return dataclasses.replace(
        partition,
        indices=np.concatenate(held),
        offsets=np.concatenate([[0], np.cumsum([len(own) for own in held])]),
        client_names=names,
    )
