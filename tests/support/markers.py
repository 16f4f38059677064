"""What `pytest` leaves to `pytest -m slow`."""

from collections.abc import Iterable

import pytest

from fedjax_het.algorithms import METHODS

# With state at the server and at clients; with models of clients' own.
REPRESENTATIVE_METHODS = ("scaffold", "fedamp")


def slow_case(*values):
    """A slow case of a test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def method_cases(
    names: Iterable[str] = tuple(METHODS), *values, quick: Iterable[str] = REPRESENTATIVE_METHODS
) -> list:
    """Cases (name, *values) of a test that goes through all methods; those that stand for the
    rest are quick."""
    return [(pytest.param if name in quick else slow_case)(name, *values) for name in names]
