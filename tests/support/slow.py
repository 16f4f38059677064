"""What `pytest` leaves to `pytest -m slow`."""

from collections.abc import Iterable

import pytest

from fedjax_het.algorithms import METHODS

# With state at the server and at clients; with models of clients' own.
REPRESENTATIVE = ("scaffold", "fedamp")


def slow(*values):
    """A slow case of a test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def all_methods(names: Iterable[str] = tuple(METHODS), *values) -> list:
    """Cases (name, *values) of a test that goes through all methods; those that stand for the
    rest are quick."""
    quick = pytest.param
    return [(quick if name in REPRESENTATIVE else slow)(name, *values) for name in names]
