"""One tree of keys: seed -> named stream -> round -> client, and purposes where one node serves
several.

Nothing is ever drawn from a carried chain of splits, so what a client draws in a round depends
on (seed, stream, round, client id) alone: not on lanes, devices, chunks or resuming.
"""

import enum
from collections.abc import Iterator

import jax
import numpy as np

from fedjax_het.core.seed_sequence import iter_generators


class Stream(enum.IntEnum):
    """Named sources of randomness; the numbers are part of what makes a run repeatable."""

    INIT = 0
    PARTITION = 1
    PARTICIPATION = 2
    BATCHES = 3
    TRAIN = 4
    SERVER = 5
    TUNING = 6
    CONTROL = 7  # data that stand in for what a method makes


class Purpose(enum.IntEnum):
    """What is drawn at a node of the tree besides what its children draw: no client has these ids.

    Two things that may draw at one node have purposes of their own, here and nowhere else.
    """

    SERVER = 2**32 - 1  # what a method does with the model after a round, and keeps from the start
    CONDENSATION_NETWORKS = 2**32 - 2  # networks that clients draw while they condense
    TUNING = 2**32 - 3  # copies of the global model that clients tune to be scored
    MIXING = 2**32 - 4  # what a step's minibatch is mixed with
    GENERATED_SAMPLES = 2**32 - 5  # what a client has generated beside a step's minibatch
    GENERATOR = 2**32 - 6  # the generator at the server, at its start and in every round
    LOGIT_NOISE = 2**32 - 7  # noise on what clients tell of their logits, where that is private


def fold_in_purpose(key: jax.Array, purpose: Purpose) -> jax.Array:
    """The key of one purpose at a node."""
    return jax.random.fold_in(key, int(purpose))


def make_stream_key(seed: int, stream: Stream) -> jax.Array:
    """The typed key of one stream of a run."""
    return jax.random.fold_in(jax.random.key(seed), int(stream))


def make_host_rng(seed: int, stream: Stream, *path: int) -> np.random.Generator:
    """A NumPy generator for one node of the key tree, e.g. `(seed, BATCHES, round, client)`."""
    return np.random.default_rng([seed, int(stream), *path])


def iter_host_rngs(
    seed: int, stream: Stream, *path: int | np.ndarray
) -> Iterator[np.random.Generator]:
    """`make_host_rng` for many nodes, one after the other, some ten times faster: numbers of the path
    that are arrays `[n]` have one entry for each. The generator of one ends with the next."""
    return iter_generators((seed, int(stream), *path))
