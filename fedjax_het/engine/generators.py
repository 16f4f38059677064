"""NumPy's generators for many nodes of the key tree at once.

`numpy.random.default_rng(entropy)` takes some 25 microseconds, most of them to mix its entropy into
a state. A round that draws for a thousand clients mixes theirs side by side here, and one generator
takes on one state after the other. The numbers are those of `default_rng`, which its authors
promise not to change: the mixing is SeedSequence's (after M. E. O'Neill's seed_seq_fe128), the
state PCG64's.
"""

from collections.abc import Iterator, Sequence

import numpy as np

_POOL = 4  # words of 32 bits
_WORD = 2**32 - 1
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)
_PCG = 0x2360ED051FC65DA44385DF649FCCF645
_STATE = 2**128 - 1


def generators(entropy: Sequence[int | np.ndarray]) -> Iterator[np.random.Generator]:
    """For each of n rows of entropy the generator that `default_rng` makes of it.

    Always the same object, which begins anew: draw from it before the next one is asked for.

    Args:
      entropy: whole numbers >= 0; those that differ between rows are arrays `[n]` of numbers below
        2^32.
    """
    bits = np.random.PCG64(0)
    generator = np.random.Generator(bits)
    for words in _states(_pool(_words(entropy))).tolist():
        start, increment = words[0] << 64 | words[1], words[2] << 64 | words[3]
        increment = (increment << 1 | 1) & _STATE
        state = ((start + increment) * _PCG + increment) & _STATE
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": increment},
            "has_uint32": 0,
            "uinteger": 0,
        }
        yield generator


def _words(entropy: Sequence[int | np.ndarray]) -> list[np.ndarray]:
    """The entropy as words of 32 bits, the lowest first, `[n]` each."""
    count = max(np.size(part) for part in entropy)
    words = []
    for part in entropy:
        if isinstance(part, np.ndarray):
            words.append(part.astype(np.uint32))
            continue
        number = int(part)
        while True:
            words.append(np.full(count, number & _WORD, np.uint32))
            number >>= 32
            if not number:
                break
    return words


class _Hash:
    """Each word that goes through it changes what it does to the next."""

    def __init__(self, start: int, factor: int):
        self._constant, self._factor = start, factor

    def __call__(self, words: np.ndarray) -> np.ndarray:
        words = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & _WORD
        words = words * np.uint32(self._constant)
        return words ^ (words >> _SHIFT)


def _pool(words: list[np.ndarray]) -> list[np.ndarray]:
    """Mix them."""
    hashed = _Hash(_INIT_A, _MULT_A)
    nothing = np.zeros_like(words[0])
    pool = [hashed(word) for word in [*words, *[nothing] * _POOL][:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mixed(pool[target], hashed(pool[source]))
    for word in words[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mixed(pool[target], hashed(word))
    return pool


def _mixed(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    both: np.ndarray = one * _MIX_LEFT - other * _MIX_RIGHT
    return both ^ (both >> _SHIFT)


def _states(pool: list[np.ndarray]) -> np.ndarray:
    """`[n, 4]` uint64 drawn from the pool."""
    hashed = _Hash(_INIT_B, _MULT_B)
    words = np.stack([hashed(pool[i % _POOL]) for i in range(8)], 1).astype(np.uint64)
    return words[:, ::2] | words[:, 1::2] << np.uint64(32)
