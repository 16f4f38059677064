"""Ranges of methods, and trials in these ranges."""

import pytest

from fedjax_het import RunSpec
from fedjax_het.methods import METHODS, SearchRange
from fedjax_het.tuning.search_space import draw_trials, fix_constants, get_search_space
from fedjax_het.tuning.tuner import Budget
from fedjax_het.utils.errors import ConfigError

SPEC = RunSpec("fedprox", "digits", model="mlp", num_clients=4)


def test_learning_rate_has_a_range_around_its_default():
    default = SPEC.resolved().hyperparameters["local_lr"]
    ranges = get_search_space(SPEC)
    assert list(ranges) == ["local_lr", "prox_mu"]
    assert ranges["local_lr"] == SearchRange(default / 10, default * 10)


@pytest.mark.parametrize("name", METHODS)
def test_declared_ranges_are_valid_and_contain_the_default(name):
    method = METHODS[name]
    records = method.collect_method_hyperparameters(method.complete_options({}), 10)
    for hyperparameter, record in records.items():
        if (chosen := record.search_range) is not None:
            assert record.bounds.contains(chosen.low), hyperparameter
            assert record.bounds.contains(chosen.high), hyperparameter
            assert chosen.low < chosen.high, hyperparameter
            assert chosen.low > 0 or not chosen.is_log, hyperparameter


def test_given_hyperparameters_are_constant():
    spec = RunSpec("fedprox", "digits", learning_rate=0.5, hp={"prox_mu": 0.2})
    assert get_search_space(spec) == {}
    assert draw_trials(spec, {}, 9) == [spec]


def test_ranges_of_the_user():
    space = {"prox_mu": (0.1, 0.2), "local_lr": 0.3, "ditto_lambda": 1.0}
    spec = fix_constants(SPEC, space)
    assert spec.hyperparameters["local_lr"] == 0.3
    assert get_search_space(spec, space) == {"prox_mu": SearchRange(0.1, 0.2)}


@pytest.mark.parametrize(
    "values", [(0.2, 0.1), (0.0, 1.0), (-1.0, 1.0), (1.0,), "0.1", (-1.0, 1.0, False)]
)
def test_invalid_ranges_are_refused(values):
    with pytest.raises(ConfigError, match=r"space\['prox_mu'\]"):
        get_search_space(SPEC, {"prox_mu": values})


def test_trials_cover_the_range_and_begin_with_the_defaults():
    trials = draw_trials(SPEC, {"prox_mu": SearchRange(0.01, 1.0)}, 9)
    values = [trial.hyperparameters.get("prox_mu") for trial in trials]
    assert trials[0] == SPEC
    # Of 8 points of a Sobol sequence, each eighth of the range has one.
    shares = sorted(values[1:])
    limits = [SearchRange(0.01, 1.0).interpolate(i / 8) for i in range(9)]
    assert all(limits[i] <= shares[i] <= limits[i + 1] for i in range(8))
    assert draw_trials(SPEC, {"prox_mu": SearchRange(0.01, 1.0)}, 9) == trials


def test_interpolation_by_hand():
    assert SearchRange(0.1, 10).interpolate(0.5) == 1.0
    assert SearchRange(0.1, 0.9, is_log=False).interpolate(0.25) == 0.3


def test_budget_by_hand():
    budget = Budget(9, 3, 3)
    assert budget.list_rungs(20) == [(9, 3), (3, 7), (1, 20)]
    assert budget.count_rounds(20) == 9 * 3 + 3 * (7 - 3) + 13
    assert Budget(5, 1, 3).list_rungs(20) == [(5, 20)]
    assert budget.list_rungs(20, 6) == [(9, 6), (3, 7), (1, 20)]
    assert budget.count_rounds(20, 6) == 9 * 6 + 3 * (7 - 6) + 13
    assert budget.list_rungs(20, 30) == [(9, 20), (3, 20), (1, 20)]
