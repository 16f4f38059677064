"""Arrays of any type as 32-bit words and back, bit by bit, so that one collective carries them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.common.arrays import is_key

Tree = Any


def to_words(leaf: jax.Array) -> jax.Array:
    """[n] uint32: the bits of an array of any type that jax has, random keys among them."""
    bits = _plain(leaf).reshape(-1)
    size = bits.dtype.itemsize
    if size >= 4:
        return jax.lax.bitcast_convert_type(bits, jnp.uint32).reshape(-1)
    per_word = 4 // size
    bits = jax.lax.bitcast_convert_type(bits, {1: jnp.uint8, 2: jnp.uint16}[size])
    bits = jnp.pad(bits, (0, -bits.size % per_word)).reshape(-1, per_word)
    return jax.lax.bitcast_convert_type(bits, jnp.uint32)


def from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """[D, ...] the arrays like `like` whose words are the rows of `words` [D, n]."""
    plain = jax.eval_shape(_plain, like)
    rows, size = words.shape[0], plain.dtype.itemsize
    if size == 8:
        bits = jax.lax.bitcast_convert_type(words.reshape(rows, -1, 2), plain.dtype)
    elif size == 4:
        bits = jax.lax.bitcast_convert_type(words, plain.dtype)
    else:
        small = jax.lax.bitcast_convert_type(words, {1: jnp.uint8, 2: jnp.uint16}[size])
        small = small.reshape(rows, -1)[:, : plain.size]
        bits = jax.lax.bitcast_convert_type(small, plain.dtype)
    return _restored(bits.reshape(rows, *plain.shape), like.dtype)


def _plain(leaf: jax.Array) -> jax.Array:
    """The same in a type whose bits can be taken: of 1, 2, 4 or 8 bytes, and not complex."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint8)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([leaf.real, leaf.imag], axis=-1)
    if _bits(leaf.dtype) < 8:  # two or more share a byte
        return leaf.astype(jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.int8)
    return leaf


def _restored(plain: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(plain, impl=jax.random.key_impl(jnp.zeros((), dtype)))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(plain[..., 0], plain[..., 1])
    return plain.astype(dtype)


def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return 8 * np.dtype(dtype).itemsize
