"""TFRecord files, read without TensorFlow.

A record is its length (64 bits, little-endian), the masked CRC-32C of the length, the content, and
the masked CRC-32C of the content. See https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_HEADER_SIZE, _CRC_SIZE = 12, 4
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, with reversed bits
_MASK_OFFSET = 0xA282EAD8
_INITIAL_STATE = np.uint32(0xFFFFFFFF)
_BLOCK = 256  # bytes whose checksums are computed one by one; blocks are computed together
_READ_AT_ONCE = 2**25  # bytes


def iter_records(path: Path) -> Iterator[bytes]:
    """Iterate over the records of a TFRecord file.

    Args:
      path: the file, without compression.

    Yields:
      The content of each record.

    Raises:
      ValueError: if the file is truncated, or if a checksum is wrong.
      OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        while parts := _read_parts(path.name, file):
            _require_checksums(path.name, parts)
            yield from (content for content, _ in parts[1::2])


def _read_parts(name: str, file: Any) -> list[tuple[bytes, bytes]]:
    """Read the length and the content of the next records, some 32 MB, each with its checksum."""
    parts: list[tuple[bytes, bytes]] = []
    file_size, start = os.fstat(file.fileno()).st_size, file.tell()
    while (position := file.tell()) < min(file_size, start + _READ_AT_ONCE):
        header = file.read(_HEADER_SIZE)
        length = int.from_bytes(header[:8], "little")
        if position + _HEADER_SIZE + length + _CRC_SIZE > file_size:
            raise ValueError(f"{name} ends within a record")
        parts += [(header[:8], header[8:]), (file.read(length), file.read(_CRC_SIZE))]
    return parts


def _require_checksums(name: str, parts: Sequence[tuple[bytes, bytes]]) -> None:
    contents, checksums = zip(*parts, strict=True)
    stored = np.frombuffer(b"".join(checksums), "<u4")
    crc = compute_crc32c(contents)
    masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK_OFFSET)
    if (masked != stored).any():
        raise ValueError(f"{name} has a record with a wrong checksum")


def compute_crc32c(buffers: Sequence[bytes]) -> np.ndarray:
    """Compute the CRC-32C of many buffers together, in about 20 ns per byte.

    Buffers are divided into blocks of 256 bytes, and the states of all blocks advance together,
    byte after byte. A block that is not the first one starts at state 0. Since the state is linear,
    the state of the previous block, advanced by 256 zeros, is added to its result (XOR). A first
    block has zeros before its first byte, so that all blocks have one size.

    Args:
      buffers: B buffers.

    Returns:
      Checksums, uint32 `[B]`.

    Example:
      >>> from fedjax_het.data.sources.tfrecord import compute_crc32c
      >>> hex(compute_crc32c([b"123456789"])[0])
      '0xe3069283'
    """
    lengths = np.array([len(buffer) for buffer in buffers])
    num_blocks = np.maximum(-(-lengths // _BLOCK), 1)
    ends = np.cumsum(num_blocks)
    first_blocks = ends - num_blocks
    padded = np.zeros((int(ends[-1]), _BLOCK), np.uint8)
    content = padded.reshape(-1)
    for buffer, end in zip(buffers, (ends * _BLOCK).tolist(), strict=True):
        content[end - len(buffer) : end] = np.frombuffer(buffer, np.uint8)
    starts = np.full(len(padded), -1)
    starts[first_blocks] = num_blocks * _BLOCK - lengths
    states = np.zeros(len(padded), np.uint32)
    for column, values in enumerate(np.ascontiguousarray(padded.T)):
        states[starts == column] = _INITIAL_STATE
        states = _advance(states, values)
    states[starts == _BLOCK] = _INITIAL_STATE  # empty buffers
    checksums = states[first_blocks]
    for block in range(1, int(num_blocks.max())):
        rows = np.flatnonzero(num_blocks > block)
        advanced = _advance_by_block(checksums[rows])
        checksums[rows] = advanced ^ states[first_blocks[rows] + block]
    return checksums ^ _INITIAL_STATE


def _advance(states: np.ndarray, values: Any) -> np.ndarray:
    """Return the states after one more byte of each."""
    return _make_table()[(states ^ values) & 0xFF] ^ (states >> np.uint32(8))


def _advance_by_block(states: np.ndarray) -> np.ndarray:
    """Return the states after 256 more zeros: the sum over the states' four bytes."""
    shifts = np.arange(0, 32, 8, dtype=np.uint32)
    parts = _make_block_tables()[np.arange(4), (states[:, None] >> shifts) & 0xFF]
    return np.bitwise_xor.reduce(parts, axis=1)


@functools.cache
def _make_table() -> np.ndarray:
    """Return the states after one byte, uint32 `[256]`."""
    states = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        states = np.where(states & 1, (states >> 1) ^ np.uint32(_POLYNOMIAL), states >> 1)
    return states


@functools.cache
def _make_block_tables() -> np.ndarray:
    """Return the states after a byte at one of four places and 256 zeros, uint32 `[4, 256]`."""
    states = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    for _ in range(_BLOCK):
        states = _advance(states, np.uint8(0))
    return states
