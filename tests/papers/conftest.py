"""Fixtures of the tests of tables and figures."""

import pytest


@pytest.fixture
def forbid_runs(monkeypatch):
    """Fail a test where a run that is done is made again."""

    def prepare_group(*args, **keywords):
        raise AssertionError("a run that is done was made again")

    monkeypatch.setattr("fedjax_het.runtime.sweep.prepare_group", prepare_group)
