"""One tree of keys: seed -> named stream -> round -> client.

Nothing is ever drawn from a carried chain of splits, so what a client draws in a round depends
on (seed, stream, round, client id) alone: not on lanes, devices, chunks or resuming.
"""

import enum

import jax
import numpy as np


class Stream(enum.IntEnum):
    """Named sources of randomness; the numbers are part of what makes a run repeatable."""

    INIT = 0
    PARTITION = 1
    PARTICIPATION = 2
    BATCHES = 3
    TRAIN = 4
    SERVER = 5
    TUNING = 6


# Folded into a round's key for what the server draws; no client has this id.
SERVER_FOLD = 2**32 - 1
NETWORKS_FOLD = 2**32 - 2  # and for the networks that clients draw while they condense
MIXING_FOLD = 2**32 - 4  # into a step's, for what its batch is mixed with
GENERATOR_FOLD = 2**32 - 5  # and for what a client has generated beside it
TUNING_FOLD = 2**32 - 3  # and for copies of the global model that clients tune to be scored


def device_key(seed: int, stream: Stream) -> jax.Array:
    """The typed key of one stream of a run."""
    return jax.random.fold_in(jax.random.key(seed), int(stream))


def host_rng(seed: int, stream: Stream, *path: int) -> np.random.Generator:
    """A NumPy generator for one node of the key tree, e.g. `(seed, BATCHES, round, client)`."""
    return np.random.default_rng([seed, int(stream), *path])
