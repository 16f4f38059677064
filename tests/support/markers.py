"""Cases that `pytest` leaves to `pytest -m slow` and to `pytest -m long`."""

from collections.abc import Iterable

import pytest

from fedjax_het.algorithms import METHODS

# With state at the server and at clients; with models of clients' own.
REPRESENTATIVE_METHODS = ("scaffold", "fedamp")
# One method for each structure of state, rounds and server work. Further methods of a structure
# have the same programs around their own rules, which their own test files check.
DISTINCT_METHODS = (
    *("fedavg", "scaffold", "fedadam", "fedmix", "fedbuff", "dynafed", "fedaf", "fedbe", "fedgen"),
    *("ccvr", "fsl", "fedavg_ft", "fedamp", "ditto", "ifca", "fedrod", "fedproto", "fedrep"),
)


def slow_case(*values):
    """A slow case of a test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long_case(*values):
    """A case of a test that runs before a release."""
    return pytest.param(*values, marks=pytest.mark.long)


def method_cases(
    names: Iterable[str] = tuple(METHODS), *values, quick: Iterable[str] = REPRESENTATIVE_METHODS
) -> list:
    """Cases (name, *values) of a test that goes through all methods.

    Methods of `quick` are in the fast tests, `DISTINCT_METHODS` in the slow tests, and all others
    in the long tests.
    """
    make_case = {**dict.fromkeys(DISTINCT_METHODS, slow_case), **dict.fromkeys(quick, pytest.param)}
    return [make_case.get(name, long_case)(name, *values) for name in names]
