"""What goes wrong with files, on purpose."""

import contextlib
import errno
import io
import os
from pathlib import Path

from fedjax_het import Placement
from fedjax_het.utils import io as files
from support.small_runs import make_spec

DAMAGE_KINDS = ("flipped", "truncated", "empty", "replaced")


def damage_file(path, kind, rng):
    """Spoil a file at a random place. `rng`: a `numpy.random.Generator`."""
    data = bytearray(path.read_bytes())
    position = int(rng.integers(len(data)))
    if kind == "flipped":
        data[position] ^= int(rng.integers(1, 256))
    elif kind == "truncated":
        del data[position:]
    elif kind == "empty":
        data.clear()
    else:
        data = bytearray(rng.bytes(len(data)))
    path.write_bytes(data)


class _LimitedFile(io.BufferedRandom):
    """A file on a disk with room for so many more bytes."""

    def __init__(self, path, remaining_bytes):
        super().__init__(io.FileIO(path, "x+"))
        self._remaining_bytes = remaining_bytes

    def write(self, data):
        self._remaining_bytes[0] -= len(data)
        if self._remaining_bytes[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@contextlib.contextmanager
def _replace_open(monkeypatch, folder, open_below):
    """Open new files below `folder` by another function."""
    original_open = files._open_new_file

    def open_(path, mode):
        return open_below(path) if folder in Path(path).parents else original_open(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_open_new_file", open_)
        yield


@contextlib.contextmanager
def simulate_full_disk(monkeypatch, folder, num_bytes):
    """Below `folder` there is room for so many bytes; elsewhere for any number."""
    remaining_bytes = [num_bytes]
    with _replace_open(monkeypatch, folder, lambda path: _LimitedFile(path, remaining_bytes)):
        yield


@contextlib.contextmanager
def simulate_read_only_folder(monkeypatch, folder):
    """Nothing can be written below `folder`, to root neither."""

    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with _replace_open(monkeypatch, folder, refuse):
        yield


PLACEMENT = Placement(lanes=1, spread="runs")


def make_short_spec(method, **settings):
    """A run of few rounds, in each of which there is much to be lost."""
    return make_spec(method, **{"rounds": 6, **settings})


def make_seed_specs(method):
    return [make_short_spec(method, seed=seed) for seed in range(3)]
