"""Arrays of every type as words and back, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.core.device_exchange import bitcast_from_words, bitcast_to_words

TYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16"),
    *("uint32", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16"),
    *("float16", "float32", "complex64"),
)


def there_and_back(rows):
    """`rows` [D, ...] through words, as a collective carries them."""
    words = jax.jit(jax.vmap(bitcast_to_words))(rows)
    assert words.dtype == jnp.uint32 and words.ndim == 2
    actual = jax.jit(lambda words: bitcast_from_words(words, rows[0]))(words)
    assert actual.dtype == rows.dtype and actual.shape == rows.shape
    return actual


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_bitcast_round_trip_of_types(dtype, shape):
    largest = 2 if dtype in ("bool", "int2") else 4 if dtype == "uint2" else 7
    numbers = np.random.default_rng(0).integers(dtype == "float8_e8m0fnu", largest, (3, *shape))
    rows = jnp.asarray(numbers).astype(dtype)
    plain = "complex64" if dtype == "complex64" else "float32"
    np.testing.assert_array_equal(there_and_back(rows).astype(plain), rows.astype(plain))


@pytest.mark.parametrize("bits", [np.uint8, np.uint16, np.uint32])
def test_bitcast_round_trip_of_bits(bits):
    """Not-a-numbers with their payloads, infinities, negative zeros."""
    all_bits = np.random.default_rng(1).integers(0, np.iinfo(bits).max, (2, 999), bits, True)
    kinds = {np.uint8: "float8_e5m2", np.uint16: "bfloat16", np.uint32: "float32"}
    rows = jnp.asarray(all_bits.view(jnp.dtype(kinds[bits])))
    actual = np.asarray(there_and_back(rows))
    np.testing.assert_array_equal(actual.view(bits), all_bits)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_bitcast_round_trip_of_keys(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), (3, 2))
    assert bool((there_and_back(keys) == keys).all())


def test_narrow_arrays_share_words():
    for dtype, size in (("int8", 3), ("bfloat16", 5), ("bool", 3), ("float32", 10)):
        assert bitcast_to_words(jnp.zeros(10, dtype)).shape == (size,), dtype
