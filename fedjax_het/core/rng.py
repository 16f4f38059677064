"""One tree of keys: seed -> named stream -> round -> client.

A node that serves several draws has a purpose for each.

No value is drawn from a carried chain of splits. The draws of a client in a round therefore depend
on (seed, stream, round, client id) alone, not on lanes, devices, chunks or resuming.
"""

import enum
from collections.abc import Iterator

import jax
import numpy as np

from fedjax_het.utils.arrays import make_key


class Stream(enum.IntEnum):
    """Named sources of randomness; the numbers are part of a run's repeatability."""

    INIT = 0
    PARTICIPATION = 2
    BATCHES = 3
    TRAIN = 4
    SERVER = 5
    TUNING = 6
    CONTROL = 7  # substitutes for a method's data in control experiments
    SKEW = 8  # noise of feature skews
    SYSTEM = 9  # system heterogeneity


class Purpose(enum.IntEnum):
    """Draws at a node of the tree in addition to its children's draws; no client has these ids.

    Two draws at one node have two purposes, which are defined here and nowhere else.

    Example:
      >>> import jax
      >>> from fedjax_het.methods import Purpose, fold_in_purpose
      >>> key = fold_in_purpose(jax.random.key(0), Purpose.SERVER)
      >>> key.shape
      ()
    """

    SERVER = 2**32 - 1  # the server's work on the model after a round, and its initial state
    CONDENSATION_NETWORKS = 2**32 - 2  # networks that clients draw while they condense
    TUNING = 2**32 - 3  # copies of the global model that clients tune before their evaluation
    MIXING = 2**32 - 4  # the samples with which a step's minibatch is mixed
    GENERATED_SAMPLES = 2**32 - 5  # samples that a client generates in addition to a minibatch
    GENERATOR = 2**32 - 6  # the generator at the server, at its start and in every round
    LOGIT_NOISE = 2**32 - 7  # noise on the logits that clients upload in private training
    COMPRESSION = 2**32 - 8  # random rounding of a client's upload
    ATTACK = 2**32 - 9  # updates of malicious clients
    AGGREGATION = 2**32 - 10  # division of the clients into buckets
    PRIVACY = 2**32 - 11  # noise on the clients' mean change, or on the gradients of a client
    PRIVATE_COUNT = 2**32 - 12  # noise on the number of changes that adaptive clipping leaves


def fold_in_purpose(key: jax.Array, purpose: Purpose) -> jax.Array:
    """Return the key of one purpose at the node of `key`.

    Args:
      key: PRNG key of a node, for example of a round.
      purpose: the purpose of the draw.

    Returns:
      A PRNG key.

    Example:
      >>> import jax
      >>> from fedjax_het.core.rng import Purpose, fold_in_purpose
      >>> fold_in_purpose(jax.random.key(0), Purpose.SERVER).shape
      ()
    """
    return jax.random.fold_in(key, int(purpose))


def make_stream_key(seed: int, stream: Stream) -> jax.Array:
    """Return the PRNG key of one stream of a run.

    Args:
      seed: seed of the run.
      stream: the named stream.

    Returns:
      A PRNG key.
    """
    return jax.random.fold_in(make_key(seed), int(stream))


def make_host_rng(seed: int, stream: Stream, *path: int) -> np.random.Generator:
    """Return the NumPy generator of one node of the key tree.

    Args:
      seed: seed of the run.
      stream: the named stream.
      *path: the node below the stream, for example round and client.

    Returns:
      The generator.

    Example:
      >>> from fedjax_het.core.rng import Stream, make_host_rng
      >>> int(make_host_rng(0, Stream.BATCHES, 2, 7).integers(100)) < 100
      True
    """
    return np.random.default_rng([seed, int(stream), *path])


# `default_rng` takes some 25 microseconds, most of them to mix its entropy into a state. The mixing
# for many nodes side by side is SeedSequence's (after M. E. O'Neill's seed_seq_fe128), the state
# PCG64's; NumPy's authors promise not to change the numbers.
_POOL_SIZE = 4  # words of 32 bits
_UINT32_MASK, _UINT128_MASK = 2**32 - 1, 2**128 - 1
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_HASH_SHIFT = np.uint32(16)
_PCG64_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645


def iter_host_rngs(
    seed: int, stream: Stream, *path: int | np.ndarray
) -> Iterator[np.random.Generator]:
    """Yield `make_host_rng` of many nodes, some ten times faster.

    Args:
      seed: seed of the run.
      stream: the named stream.
      *path: the nodes below the stream; numbers that differ between nodes are arrays `[n]` of
        integers below 2^32.

    Yields:
      The generator of each node. It is one object, which restarts: draw from it before the next
      one is requested.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.core.rng import Stream, iter_host_rngs
      >>> clients = np.array([3, 5])
      >>> [rng.permutation(4).shape for rng in iter_host_rngs(0, Stream.BATCHES, 2, clients)]
      [(4,), (4,)]
    """
    bit_generator = np.random.PCG64(0)
    generator = np.random.Generator(bit_generator)
    pool = _mix_entropy(_split_into_words((seed, int(stream), *path)))
    for words in _generate_states(pool).tolist():
        start, increment = words[0] << 64 | words[1], words[2] << 64 | words[3]
        increment = (increment << 1 | 1) & _UINT128_MASK
        state = ((start + increment) * _PCG64_MULTIPLIER + increment) & _UINT128_MASK
        bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": increment},
            "has_uint32": 0,
            "uinteger": 0,
        }
        yield generator


def _split_into_words(entropy: tuple[int | np.ndarray, ...]) -> list[np.ndarray]:
    """Return the entropy as words of 32 bits, the lowest first, `[n]` each."""
    count = max(np.size(part) for part in entropy)
    words = []
    for part in entropy:
        if isinstance(part, np.ndarray):
            words.append(part.astype(np.uint32))
            continue
        number = int(part)
        for shift in range(0, max(number.bit_length(), 1), 32):
            words.append(np.full(count, number >> shift & _UINT32_MASK, np.uint32))
    return words


class _HashMixer:
    """A hash of words, of which each word changes the hash of the next."""

    def __init__(self, start: int, factor: int):
        self._constant, self._factor = start, factor

    def __call__(self, words: np.ndarray) -> np.ndarray:
        words = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & _UINT32_MASK
        words = words * np.uint32(self._constant)
        return words ^ (words >> _HASH_SHIFT)


def _mix_entropy(words: list[np.ndarray]) -> list[np.ndarray]:
    """Return SeedSequence's pool of the entropy's words."""
    hash_word = _HashMixer(_INIT_A, _MULT_A)
    padded_words = [*words, *[np.zeros_like(words[0])] * _POOL_SIZE][:_POOL_SIZE]
    pool = [hash_word(word) for word in padded_words]
    for source in range(_POOL_SIZE):
        for target in range(_POOL_SIZE):
            if source != target:
                pool[target] = _mix(pool[target], hash_word(pool[source]))
    for word in words[_POOL_SIZE:]:
        pool = [_mix(target, hash_word(word)) for target in pool]
    return pool


def _mix(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    difference: np.ndarray = first * _MIX_LEFT - second * _MIX_RIGHT
    return difference ^ (difference >> _HASH_SHIFT)


def _generate_states(pool: list[np.ndarray]) -> np.ndarray:
    """Return `[n, 4]` uint64 drawn from the pool."""
    hash_word = _HashMixer(_INIT_B, _MULT_B)
    words = np.stack([hash_word(pool[i % _POOL_SIZE]) for i in range(8)], 1).astype(np.uint64)
    return words[:, ::2] | words[:, 1::2] << np.uint64(32)
