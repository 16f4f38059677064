"""What goes wrong with files, on purpose."""

import contextlib
import errno
import io
import os
from pathlib import Path

from fedjax_het import Placement
from fedjax_het.common import files
from support.running import spec

DAMAGES = ("flipped", "truncated", "empty", "replaced")


def damage(path, kind, rng):
    """Spoil a file at a random place. `rng`: a `numpy.random.Generator`."""
    data = bytearray(path.read_bytes())
    place = int(rng.integers(len(data)))
    if kind == "flipped":
        data[place] ^= int(rng.integers(1, 256))
    elif kind == "truncated":
        del data[place:]
    elif kind == "empty":
        data.clear()
    else:
        data = bytearray(rng.bytes(len(data)))
    path.write_bytes(data)


class _Full(io.BufferedRandom):
    """A file on a disk with room for so many more bytes."""

    def __init__(self, path, room):
        super().__init__(io.FileIO(path, "x+"))
        self._room = room

    def write(self, data):
        self._room[0] -= len(data)
        if self._room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@contextlib.contextmanager
def full_disk(monkeypatch, folder, room):
    """Below `folder` there is room for so many bytes; elsewhere for any number."""
    left, opened = [room], files._opened

    def open_(path, mode):
        return _Full(path, left) if folder in Path(path).parents else opened(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_opened", open_)
        yield


@contextlib.contextmanager
def read_only(monkeypatch, folder):
    """Nothing can be written below `folder`, to root neither."""
    opened = files._opened

    def open_(path, mode):
        if folder in Path(path).parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_opened", open_)
        yield


PLACEMENT = Placement(lanes=1, spread="runs")


def short(method, **settings):
    """A run of few rounds, in each of which there is much to be lost."""
    return spec(method, **{"rounds": 6, **settings})


def runs_of(method):
    return [short(method, seed=seed) for seed in range(3)]
