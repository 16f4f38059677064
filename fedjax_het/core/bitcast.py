"""Arrays of any type as 32-bit words and back, bit by bit, so that one collective carries them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.utils.arrays import is_prng_key

Tree = Any


def bitcast_to_words(leaf: jax.Array) -> jax.Array:
    """[n] uint32: the bits of an array of any type that jax has, random keys among them."""
    bits = _to_bitcastable(leaf).reshape(-1)
    itemsize = bits.dtype.itemsize
    if itemsize >= 4:
        return jax.lax.bitcast_convert_type(bits, jnp.uint32).reshape(-1)
    per_word = 4 // itemsize
    bits = jax.lax.bitcast_convert_type(bits, {1: jnp.uint8, 2: jnp.uint16}[itemsize])
    bits = jnp.pad(bits, (0, -bits.size % per_word)).reshape(-1, per_word)
    return jax.lax.bitcast_convert_type(bits, jnp.uint32)


def bitcast_from_words(words: jax.Array, template: jax.Array) -> jax.Array:
    """[D, ...] the arrays like `like` whose words are the rows of `words` [D, n]."""
    bitcastable = jax.eval_shape(_to_bitcastable, template)
    rows, size = words.shape[0], bitcastable.dtype.itemsize
    if size == 8:
        bits = jax.lax.bitcast_convert_type(words.reshape(rows, -1, 2), bitcastable.dtype)
    elif size == 4:
        bits = jax.lax.bitcast_convert_type(words, bitcastable.dtype)
    else:
        narrow = jax.lax.bitcast_convert_type(words, {1: jnp.uint8, 2: jnp.uint16}[size])
        narrow = narrow.reshape(rows, -1)[:, : bitcastable.size]
        bits = jax.lax.bitcast_convert_type(narrow, bitcastable.dtype)
    return _from_bitcastable(bits.reshape(rows, *bitcastable.shape), template.dtype)


def _to_bitcastable(leaf: jax.Array) -> jax.Array:
    """The same in a type whose bits can be taken: of 1, 2, 4 or 8 bytes, and not complex."""
    if is_prng_key(leaf):
        return jax.random.key_data(leaf)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint8)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([leaf.real, leaf.imag], axis=-1)
    if _bit_width(leaf.dtype) < 8:  # two or more share a byte
        return leaf.astype(jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.int8)
    return leaf


def _from_bitcastable(bitcastable: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bitcastable, impl=jax.random.key_impl(jnp.zeros((), dtype)))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(bitcastable[..., 0], bitcastable[..., 1])
    return bitcastable.astype(dtype)


def _bit_width(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return 8 * np.dtype(dtype).itemsize
