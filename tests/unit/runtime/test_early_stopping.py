"""Early stopping by settings: rules, curves, models, resumed and parallel runs."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.small_runs import (
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    run_sweep,
)

from fedjax_het import ConfigError, RunSpec, load_results
from fedjax_het.runtime import group_state, runner
from fedjax_het.runtime.history import count_rounds_until_rule, evaluate_rules

ROUNDS = 24


def find_end(accuracies, target_accuracy=math.inf, patience=math.inf, min_delta=0.0):
    """Return the round, from 1, in which the rules end a run; None if they do not.

    The target is reached, or the best of the last `patience` measured rounds is no gain over the
    best round before them.
    """
    rounds = [r for r, a in enumerate(accuracies) if np.isfinite(a)]
    bests, last_gain = {}, 0
    for count, r in enumerate(rounds, 1):
        now = accuracies[r]
        if not bests or now > np.float32(bests[last_gain] + np.float32(min_delta)):
            last_gain = count
            bests[count] = now
        if now >= np.float32(target_accuracy) or count - last_gain >= patience:
            return r + 1
    return None


def draw_case(rng):
    accuracies = np.round(np.cumsum(rng.normal(0.01, 0.05, ROUNDS)).clip(0, 1), 2)
    accuracies = accuracies.astype(np.float32)
    every = int(rng.integers(1, 4))
    due = (np.arange(ROUNDS) % every == every - 1) | (np.arange(ROUNDS) >= ROUNDS - 5)
    rules = {
        "target_accuracy": float(rng.choice([0.1, 0.3, 0.5])) if rng.random() < 0.6 else None,
        "patience": int(rng.integers(1, 6)) if rng.random() < 0.8 else None,
    }
    if rules["patience"] and rng.random() < 0.5:
        rules["min_delta"] = float(rng.choice([0.01, 0.05]))
    return np.where(due, accuracies, np.nan).astype(np.float32), due, rules


def drop_unset(rules):
    return {name: value for name, value in rules.items() if value is not None}


def test_rules_match_reference_on_random_curves():
    rng, ends = np.random.default_rng(0), 0
    for _ in range(2000):
        accuracies, _, rules = draw_case(rng)
        actual = evaluate_rules(RunSpec(**rules), accuracies).early_stop
        expected = find_end(accuracies, **drop_unset(rules))
        assert (None if actual is None else actual.round) == expected
        ends += expected is not None
    assert 500 < ends < 1900


def test_chunks_end_where_a_rule_could_end_the_run():
    """Chunks are as long as possible: the worst curve would end the run there."""
    rng, checked = np.random.default_rng(1), 0
    for _ in range(300):
        accuracies, due, rules = draw_case(rng)
        settings = RunSpec(**rules, rounds=ROUNDS)
        scheduler = SimpleNamespace(is_eval_round=due.__getitem__)
        last = find_end(accuracies, **drop_unset(rules)) or ROUNDS
        for done in range(last):
            count = count_rounds_until_rule(settings, scheduler, accuracies[:done])
            assert 1 <= count <= last - done
            begun = np.isfinite(accuracies[:done]).any()  # the first measured is always a gain
            if begun and (rules["target_accuracy"] or rules["patience"]):
                flat = np.where(due, np.where(np.arange(ROUNDS) < done, accuracies, 0), np.nan)
                best = np.where(due, np.where(np.arange(ROUNDS) < done, accuracies, 1), np.nan)
                soonest = [
                    find_end(a.astype(np.float32), **drop_unset(rules)) for a in (flat, best)
                ]
                assert done + count == min([end for end in soonest if end] or [ROUNDS])
                checked += 1
    assert checked > 1000


CASES = {
    "target": ("fedavg", {"target_accuracy": 0.45}),
    "plateau": ("fedavg", {"patience": 4, "min_delta": 0.02}),
    "both, evaluated now and then": (
        "scaffold",
        {"target_accuracy": 0.9, "patience": 3, "eval_every": 3},
    ),
    "clients' mean": ("fedamp", {"patience": 3}),
}


@pytest.mark.parametrize("case", [slow_case(case) if case == "target" else case for case in CASES])
def test_stopped_run_is_a_prefix_of_the_whole_run(case):
    name, rules = CASES[case]
    kept = {"eval_every": rules["eval_every"]} if "eval_every" in rules else {}
    whole = run_spec(make_spec(name, rounds=ROUNDS, **kept))
    result = run_spec(make_spec(name, rounds=ROUNDS, **rules))
    curve = "mean_client_accuracy" if name == "fedamp" else "test_accuracy"
    end = find_end(whole.metrics[curve], **{k: v for k, v in rules.items() if k != "eval_every"})
    assert end is not None and 1 < end < ROUNDS
    for metric, values in whole.metrics.items():
        np.testing.assert_array_equal(result.metrics[metric][:end], values[:end], err_msg=metric)
        after = result.metrics[metric][end:]
        unsaid = after == 0 if metric in ("bytes_up", "bytes_down", "client_samples") else None
        assert (np.isnan(after) if unsaid is None else unsaid).all(), metric
    entries = result.summary["stopped_early"]
    assert entries["round"] == result.summary["rounds"] == end and entries["reason"]
    assert entries["why"] == (
        "target" if "target_accuracy" in rules and len(rules) == 1 else "plateau"
    )
    assert not result.summary["diverged"] and whole.summary["stopped_early"] is None
    measured = whole.metrics[curve][:end]
    last = measured[np.isfinite(measured)][-5:]
    final = result.summary["final_client_accuracy" if name == "fedamp" else "final_accuracy"]
    assert final == pytest.approx(last.astype(np.float64).mean(), rel=1e-6)
    if name != "fedamp":
        assert result.summary["last_accuracy"] == last[-1]
        data = make_user_dataset()
        tested = result.model().evaluate(data.test_inputs, data.test_labels)
        assert tested.accuracy == pytest.approx(float(last[-1]), abs=1e-6)


@pytest.mark.parametrize("has_stopped", [False, True])
def test_resumed_run_stops_in_the_same_round(has_stopped, tmp_path, monkeypatch, eager):
    spec = make_spec(rounds=ROUNDS, patience=4, min_delta=0.02)
    whole = run_spec(spec)
    assert whole.summary["rounds"] < ROUNDS

    def kill(*_):
        raise KilledError

    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    for num_calls in (None,) if has_stopped else (2, whole.summary["rounds"] - 1):
        folder = tmp_path / str(num_calls)
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            if has_stopped:  # after the rule was met, before the result is written
                patch.setattr("fedjax_het.runtime.session.build_results", kill)
            progress = None if has_stopped else make_killing_callback(num_calls)
            run_spec(spec, output_dir=folder, progress=progress)
        resumed = run_spec(spec, output_dir=folder, resume=True)
        assert_results_equal(resumed, whole)
        assert resumed.summary["stopped_early"] == whole.summary["stopped_early"]


def test_target_in_the_last_round_is_no_early_stop():
    assert run_spec(make_spec(rounds=5, eval_every=5)).metrics["test_accuracy"].max() > 0
    assert run_spec(make_spec(rounds=5, patience=5)).summary["stopped_early"] is None


def test_min_delta_requires_patience():
    with pytest.raises(
        ConfigError, match=r"^min_delta = 0\.1: expected no value, or patience >= 1"
    ):
        RunSpec(min_delta=0.1).resolved()


def test_settings_without_effect_keep_the_digest():
    assert RunSpec(min_delta=0.0, patience=3).digest() == RunSpec(patience=3).digest()
    assert RunSpec(patience=3).digest() != RunSpec().digest()
    assert not {"target_accuracy", "patience", "min_delta"} & RunSpec().resolved().to_dict().keys()


@pytest.mark.parametrize("width", [slow_case(1), slow_case(2)])
def test_parallel_runs_stop_as_single_runs(width, tmp_path, monkeypatch):
    """The runs share programs; some are suspended, so that others can take free slots."""
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 5)
    starts, init_states = [], runner.init_states

    def record_start(state):
        starts.append(len(state.prepared_runs))
        init_states(state)

    monkeypatch.setattr(runner, "init_states", record_start)
    rules = [
        {"target_accuracy": 0.4},
        {"patience": 2},
        {"patience": 5},
        {"target_accuracy": 0.5, "patience": 3},
    ]
    base = make_spec(rounds=ROUNDS)
    specs = [dataclasses.replace(base, seed=s, **rule) for s in range(2) for rule in rules]
    specs = [*specs[2:], base]
    sweep_result = run_sweep(specs, tmp_path, width=width, spread="runs", lanes=1)
    if width > 1:
        assert sum(starts) > len(specs)  # some went on from where they had waited
    alone = [run_spec(each, lanes=1, devices=1) for each in specs]
    for one, other in zip(sweep_result.results, alone, strict=True):
        assert one.summary["rounds"] == other.summary["rounds"]
        assert one.summary["stopped_early"] == other.summary["stopped_early"]
        for name, values in other.metrics.items():
            tolerance = {"rtol": 2e-4, "atol": 2e-5}
            np.testing.assert_allclose(one.metrics[name], values, err_msg=name, **tolerance)
    frame = load_results(tmp_path)
    assert len(frame) == len(specs) and frame["stopped_early.why"].notna().sum() >= 4
    assert not (tmp_path / "unfinished").exists()
