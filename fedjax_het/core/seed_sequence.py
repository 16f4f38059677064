"""NumPy's generators for many nodes of the key tree at once.

`numpy.random.default_rng(entropy)` takes some 25 microseconds, most of them to mix its entropy into
a state. A round that draws for a thousand clients mixes theirs side by side here, and one generator
takes on one state after the other. The numbers are those of `default_rng`, which its authors
promise not to change: the mixing is SeedSequence's (after M. E. O'Neill's seed_seq_fe128), the
state PCG64's.
"""

from collections.abc import Iterator, Sequence

import numpy as np

_POOL_SIZE = 4  # words of 32 bits
_UINT32_MASK = 2**32 - 1
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_HASH_SHIFT = np.uint32(16)
_PCG64_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
_UINT128_MASK = 2**128 - 1


def iter_generators(entropy: Sequence[int | np.ndarray]) -> Iterator[np.random.Generator]:
    """For each of n rows of entropy the generator that `default_rng` makes of it.

    Always the same object, which begins anew: draw from it before the next one is asked for.

    Args:
      entropy: whole numbers >= 0; those that differ between rows are arrays `[n]` of numbers below
        2^32.
    """
    bit_generator = np.random.PCG64(0)
    generator = np.random.Generator(bit_generator)
    for words in _generate_states(_mix_entropy(_split_into_words(entropy))).tolist():
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


def _split_into_words(entropy: Sequence[int | np.ndarray]) -> list[np.ndarray]:
    """The entropy as words of 32 bits, the lowest first, `[n]` each."""
    count = max(np.size(part) for part in entropy)
    words = []
    for part in entropy:
        if isinstance(part, np.ndarray):
            words.append(part.astype(np.uint32))
            continue
        number = int(part)
        while True:
            words.append(np.full(count, number & _UINT32_MASK, np.uint32))
            number >>= 32
            if not number:
                break
    return words


class _HashMixer:
    """Each word that goes through it changes what it does to the next."""

    def __init__(self, start: int, factor: int):
        self._state_constant, self._factor = start, factor

    def __call__(self, words: np.ndarray) -> np.ndarray:
        words = words ^ np.uint32(self._state_constant)
        self._state_constant = self._state_constant * self._factor & _UINT32_MASK
        words = words * np.uint32(self._state_constant)
        return words ^ (words >> _HASH_SHIFT)


def _mix_entropy(words: list[np.ndarray]) -> list[np.ndarray]:
    """Mix them."""
    hash_word = _HashMixer(_INIT_A, _MULT_A)
    zero_word = np.zeros_like(words[0])
    pool = [hash_word(word) for word in [*words, *[zero_word] * _POOL_SIZE][:_POOL_SIZE]]
    for source in range(_POOL_SIZE):
        for target in range(_POOL_SIZE):
            if source != target:
                pool[target] = _mix(pool[target], hash_word(pool[source]))
    for word in words[_POOL_SIZE:]:
        for target in range(_POOL_SIZE):
            pool[target] = _mix(pool[target], hash_word(word))
    return pool


def _mix(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    difference: np.ndarray = first * _MIX_LEFT - second * _MIX_RIGHT
    return difference ^ (difference >> _HASH_SHIFT)


def _generate_states(pool: list[np.ndarray]) -> np.ndarray:
    """`[n, 4]` uint64 drawn from the pool."""
    hash_word = _HashMixer(_INIT_B, _MULT_B)
    words = np.stack([hash_word(pool[i % _POOL_SIZE]) for i in range(8)], 1).astype(np.uint64)
    return words[:, ::2] | words[:, 1::2] << np.uint64(32)
