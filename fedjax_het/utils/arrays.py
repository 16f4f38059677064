"""Arrays of every type of JAX in NumPy memory and in files.

Typed PRNG keys are represented by their bits, and types that NumPy lacks (bfloat16, float8, int4)
by unsigned integers of equal size.
"""

import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.utils.memory_maps import is_memory_mapped, iter_blocks

AnyArray = jax.Array | np.ndarray
"""Array on the devices or on the host."""
PRNG_IMPL = "threefry2x32"
"""Generator of all random numbers of a run."""
SMALLEST_DEVIATION = 1e-30
"""Smallest standard deviation by which inputs are divided; its inverse is finite in float32."""
_TYPE_SEPARATOR = "::"  # between the name of an array and the type that its bits represent


def is_prng_key(leaf: Any) -> bool:
    """Return whether a value is an array of typed PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_constant(mean: float, deviation: float) -> bool:
    """Return whether the deviation of float32 numbers is only rounding.

    Args:
      mean: mean of the numbers.
      deviation: standard deviation of the numbers, in their unit.

    Returns:
      True if the deviation is at most the spacing of float32 numbers near the mean, or below the
      numbers that devices represent.

    Example:
      >>> from fedjax_het.utils.arrays import is_constant
      >>> is_constant(0.0, 1e-9), is_constant(1e6, 1e-3)
      (False, True)
    """
    return deviation <= max(abs(mean) * float(np.finfo(np.float32).eps), SMALLEST_DEVIATION)


def num_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree.

    Args:
      tree: pytree of arrays.

    Returns:
      Number of bytes.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import num_bytes
      >>> num_bytes({"weights": jnp.zeros((2, 3)), "count": jnp.int32(0)})
      28
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def take_row(array: jax.Array, index: jax.Array | int) -> jax.Array:
    """Return `array[index]` for an index that is known to be valid.

    Brackets with a traced index also compile the wrap-around of negative indices: a comparison, an
    addition and a selection.

    Args:
      array: array `[N, ...]`.
      index: position in [0, N).

    Returns:
      The row `[...]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.utils.arrays import take_row
      >>> take_row(jnp.array([5, 6, 7]), 1).item()
      6
    """
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def set_row(array: jax.Array, row: jax.Array, index: jax.Array | int) -> jax.Array:
    """Return `array.at[index].set(row)`; an index behind the end addresses the last row.

    Args:
      array: array `[N, ...]`.
      row: new row `[...]`.
      index: position, >= 0.

    Returns:
      The changed array `[N, ...]`.
    """
    return jax.lax.dynamic_update_index_in_dim(array, row, index, 0, allow_negative_indices=False)


def count_nonfinite(tree: Any) -> jax.Array:
    """Count the infinite and NaN entries of each of the L floating leaves, `[L]` int32.

    A state may begin with such entries: bounds that are not reached yet, entries that are not
    written yet. Growth of the count is divergence.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.utils.arrays import count_nonfinite
      >>> count_nonfinite({"a": jnp.array([1.0, jnp.inf]), "b": jnp.arange(3)}).tolist()
      [1]
    """
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    counts = [(~jnp.isfinite(leaf)).sum(dtype=jnp.int32) for leaf in floats]
    return jnp.stack(counts) if counts else jnp.zeros(0, jnp.int32)


def has_no_new_nonfinite(new: Any, old: Any) -> jax.Array:
    """Return whether no leaf has more entries that are not finite than before.

    Cost: one pass over `new`; `old` is read only if `new` has such entries.

    Args:
      new: the new arrays.
      old: the old arrays, of the same structure.

    Returns:
      `[]` bool.
    """
    new_counts = count_nonfinite(new)
    return jax.lax.cond(
        new_counts.any(),
        lambda: (new_counts <= count_nonfinite(old)).all(),
        lambda: jnp.array(True),
    )


def pad_rows(array: AnyArray, num_rows: int) -> jax.Array:
    """Append rows of zeros to an array.

    Args:
      array: array `[N, ...]`.
      num_rows: number of rows of zeros, R.

    Returns:
      The array `[N + R, ...]`.
    """
    return jnp.pad(array, [(0, num_rows), *[(0, 0)] * (array.ndim - 1)])


def expand_like(values: jax.Array, array: jax.Array) -> jax.Array:
    """Return one value for each row of an array, with axes of length 1 behind.

    Args:
      values: `[S]`.
      array: `[S, ...]`.

    Returns:
      The values, `[S, 1, ..., 1]`, with the number of axes of `array`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.utils.arrays import expand_like
      >>> expand_like(jnp.array([1.0, 2.0]), jnp.zeros((2, 5, 3))).shape
      (2, 1, 1)
    """
    return values.reshape(-1, *[1] * (array.ndim - 1))


def normalize_weights(weights: jax.Array) -> jax.Array:
    """Divide weights by their sum; weights that are all 0 stay 0.

    Args:
      weights: `[S]`, at least 0.

    Returns:
      Weights with the sum 1 or 0, `[S]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.utils.arrays import normalize_weights
      >>> normalize_weights(jnp.array([1.0, 3.0])).tolist()
      [0.25, 0.75]
    """
    return weights / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)


def fetch_to_host(leaf: Any) -> Any:
    """Return an array that this process can address in full as a NumPy array; keys stay keys."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return from_numpy_bits(to_numpy_bits(leaf), leaf)


def make_key(seed: int | jax.Array) -> jax.Array:
    """Return a PRNG key of the package's generator, whatever generator JAX is configured to use.

    Args:
      seed: seed of the key.

    Returns:
      A PRNG key of `PRNG_IMPL`.

    Example:
      >>> import jax
      >>> from fedjax_het.utils.arrays import make_key
      >>> str(jax.random.key_impl(make_key(0)))
      'threefry2x32'
    """
    return jax.random.key(seed, impl=PRNG_IMPL)


def to_numpy_bits(leaf: Any) -> np.ndarray:
    """Return an array as NumPy array; PRNG keys `[...]` as their data `[..., n]`, uint32."""
    return np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)


def from_numpy_bits(data: AnyArray, template: Any) -> Any:
    """Invert `to_numpy_bits`.

    Args:
      data: array, or the data of keys.
      template: array of the wanted type, whose values are ignored.

    Returns:
      `data`, or typed keys with the implementation of `template`.
    """
    if not is_prng_key(template):
        return data
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(template))


def stack_on_host(leaves: Sequence[Any]) -> Any:
    """Stack arrays of one shape and type along a new leading axis, on the host."""
    return from_numpy_bits(np.stack([to_numpy_bits(leaf) for leaf in leaves]), leaves[0])


def save_arrays(
    file: BinaryIO, arrays: Mapping[str, AnyArray], *, compressed: bool = False
) -> None:
    """Write an archive of arrays as `np.savez` does.

    `np.savez` of older NumPy leaves the archive open if the disk is full, and closing it later
    prints errors that cannot be caught.

    Args:
      file: binary file, open for writing.
      arrays: arrays by name.
      compressed: compress the arrays.

    Raises:
      OSError: if the file cannot be written.
    """
    compression = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write_array(member, np.asanyarray(array))


def _write_array(file: Any, array: np.ndarray) -> None:
    """Write an array to an .npy file; one of a memory map takes little memory."""
    if not is_memory_mapped(array):
        np.lib.format.write_array(file, array, allow_pickle=False)
        return
    descr = np.lib.format.dtype_to_descr(array.dtype)
    header = {"descr": descr, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(file, header)
    for block in iter_blocks(array):
        file.write(np.ascontiguousarray(block).data)


def encode_arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return arrays as `np.savez` can store them; the names mark types that NumPy lacks."""
    encoded: dict[str, np.ndarray] = {}
    for name, leaf in arrays.items():
        data = to_numpy_bits(leaf)
        if is_prng_key(leaf):
            name = f"{name}{_TYPE_SEPARATOR}key<{jax.random.key_impl(leaf)}>"
        elif data.dtype.isbuiltin == 2:  # a type of another package: bfloat16, float8, int4
            name = f"{name}{_TYPE_SEPARATOR}{data.dtype.name}"
            data = data.view(f"u{data.dtype.itemsize}")
        encoded[name] = data
    return encoded


def decode_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Invert `encode_arrays`."""
    decoded: dict[str, Any] = {}
    for name, data in arrays.items():
        name, _, type_name = name.partition(_TYPE_SEPARATOR)
        if type_name.startswith("key<"):
            decoded[name] = jax.random.wrap_key_data(jnp.asarray(data), impl=type_name[4:-1])
        else:
            decoded[name] = data.view(jnp.dtype(type_name)) if type_name else data
    return decoded
