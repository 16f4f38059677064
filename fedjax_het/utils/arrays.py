"""Arrays of every type that jax has, in NumPy's memory and files: random keys by their bits, and
the small floats and integers that NumPy does not know by theirs."""

import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

AnyArray = jax.Array | np.ndarray  # of a program, on the devices or on the host
_TYPE_SEPARATOR = "::"  # between an array's name and the type that its bits are of


def is_prng_key(leaf: Any) -> bool:
    """Whether these are typed random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def take_row(array: jax.Array, index: jax.Array | int) -> jax.Array:
    """`array[index]` at a position that is known to be inside. Of a traced one, brackets also make
    what a negative one would mean: a comparison, an addition and a choice, many times a program."""
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def set_row(array: jax.Array, row: jax.Array, index: jax.Array | int) -> jax.Array:
    """`array.at[index].set(row)` at such a position; where it is behind the last, the last."""
    return jax.lax.dynamic_update_index_in_dim(array, row, index, 0, allow_negative_indices=False)


def pad_rows(array: AnyArray, num_rows: int) -> jax.Array:
    """`array` and so many rows of zeros behind it."""
    return jnp.pad(array, [(0, num_rows), *[(0, 0)] * (array.ndim - 1)])


def fetch_to_host(leaf: Any) -> Any:
    """The values of an array that this process can see in full: NumPy's, or keys as keys."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return from_numpy_bits(to_numpy_bits(leaf), leaf)


def to_numpy_bits(leaf: Any) -> np.ndarray:
    """The array itself; of keys `[...]` their data `[..., n]`."""
    return np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)


def from_numpy_bits(data: AnyArray, template: Any) -> Any:
    """What has these `bits` and the type of `like`."""
    if not is_prng_key(template):
        return data
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(template))


def stack_on_host(leaves: Sequence[Any]) -> Any:
    """Host arrays of one shape and type, along a new leading axis."""
    return from_numpy_bits(np.stack([to_numpy_bits(leaf) for leaf in leaves]), leaves[0])


def save_arrays(
    file: BinaryIO, arrays: Mapping[str, AnyArray], *, compressed: bool = False
) -> None:
    """An archive as `np.savez` writes it; which, of older NumPy, leaves it open where the disk is
    full, so that closing it later prints errors that nobody can catch. Raises OSError."""
    compression = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def encode_arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays by name as `np.savez` keeps them; what it would not keep is marked in its name."""
    encoded: dict[str, np.ndarray] = {}
    for name, leaf in arrays.items():
        data = to_numpy_bits(leaf)
        if is_prng_key(leaf):
            name = f"{name}{_TYPE_SEPARATOR}key<{jax.random.key_impl(leaf)}>"
        elif data.dtype.isbuiltin == 2:  # registered with NumPy by others: bfloat16, float8, int4
            name = f"{name}{_TYPE_SEPARATOR}{data.dtype.name}"
            data = data.view(f"u{data.dtype.itemsize}")
        encoded[name] = data
    return encoded


def decode_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What `encode_arrays` was given."""
    decoded: dict[str, Any] = {}
    for name, data in arrays.items():
        name, _, type_name = name.partition(_TYPE_SEPARATOR)
        if type_name.startswith("key<"):
            decoded[name] = jax.random.wrap_key_data(jnp.asarray(data), impl=type_name[4:-1])
        else:
            decoded[name] = data.view(jnp.dtype(type_name)) if type_name else data
    return decoded
