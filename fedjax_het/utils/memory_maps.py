"""Arrays in files that are mapped into memory, such as `numpy.load(path, mmap_mode="r")` returns.

The system reads a page of the file when it is first used. It counts the page as memory of the
process until the process releases it, also after the array was read. The functions here release
pages as soon as they are read, so that a pass over a file takes little memory. Released pages stay
in the system's cache of files.
"""

import mmap
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fedjax_het.utils.input_kinds import map_arrays

BLOCK_BYTES = 2**26
"""Bytes of an array that are read at once."""
# The system maps up to 2 MB of a file in its cache when one byte is read.
_ROWS_PER_RELEASE = 128


def is_memory_mapped(inputs: Any) -> bool:
    """Return whether inputs are in a file that is mapped into memory.

    Args:
      inputs: an array, or a dictionary of arrays.

    Returns:
      True if at least one array is in a file.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.utils.memory_maps import is_memory_mapped
      >>> is_memory_mapped(np.zeros(3))
      False
    """
    return any(_find_memory_map(array) is not None for array in jax.tree.leaves(inputs))


def _find_memory_map(array: Any) -> np.memmap | None:
    """Return the memory map that an array is, or is a view of."""
    while isinstance(array, np.ndarray) and not isinstance(array.base, mmap.mmap):
        array = array.base
    return array if isinstance(array, np.memmap) else None


def release_pages(array: np.ndarray) -> None:
    """Release the pages of a file that were read; another access reads them again.

    Arrays in memory, and arrays of the mode "c", whose changes are not in the file, are left alone.

    Args:
      array: the array.
    """
    memory_map = _find_memory_map(array)
    if memory_map is None or memory_map.mode == "c":
        return
    if hasattr(mmap, "MADV_DONTNEED"):  # Windows has no such advice
        assert isinstance(memory_map.base, mmap.mmap)
        memory_map.base.madvise(mmap.MADV_DONTNEED)


def iter_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of an array in blocks of at most `BLOCK_BYTES`, and release their pages.

    Args:
      array: array `[N, ...]`.

    Yields:
      Views `[n, ...]` of consecutive rows, at least one row each.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.utils.memory_maps import iter_blocks
      >>> [block.shape for block in iter_blocks(np.zeros((3, 2**23)))]
      [(1, 8388608), (1, 8388608), (1, 8388608)]
    """
    num_rows = max(1, BLOCK_BYTES // max(1, array.nbytes // max(1, len(array))))
    for first in range(0, len(array), num_rows):
        yield array[first : first + num_rows]
        release_pages(array)


def gather_rows(inputs: Any, positions: np.ndarray) -> Any:
    """Copy examples of inputs into memory.

    Args:
      inputs: an array `[N, ...]`, or a dictionary of arrays.
      positions: positions of the examples, integers `[n]`. A file is read fastest in ascending
        order.

    Returns:
      The examples, `[n, ...]`, or a dictionary of arrays.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.utils.memory_maps import gather_rows
      >>> gather_rows(np.arange(5) ** 2, np.array([1, 3]))
      array([1, 9])
    """

    def gather(array: np.ndarray) -> np.ndarray:
        if not is_memory_mapped(array):
            return array[positions]
        rows = np.empty((len(positions), *array.shape[1:]), array.dtype)
        for first in range(0, len(positions), _ROWS_PER_RELEASE):
            part = slice(first, first + _ROWS_PER_RELEASE)
            rows[part] = array[positions[part]]
            release_pages(array)
        return rows

    return map_arrays(gather, inputs)
