"""The choice of lanes: timed once, remembered, and never needed."""

import json

import jax
import pytest
from support.networks import linear_model

from fedjax_het.engine import probe
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.task import Task


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """choose_lanes with made-up timings; `choose.timed` lists what was timed."""
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path))
    timed = []

    def choose(seconds, **settings):
        def time_one(training, batch_size, devices, lanes, clients):
            timed.append(lanes)
            return seconds[lanes]

        monkeypatch.setattr(probe, "_seconds_per_step", time_one)
        monkeypatch.setattr(
            probe,
            "candidates",
            lambda devices, cohort, federations=1: [
                v for v in sorted(seconds) if v <= max(1, cohort // devices) * federations
            ],
        )
        training = LocalTraining(Task(linear_model(), (0.0,), (1.0,)), "sgd")
        defaults = {
            "batch_size": 4,
            "devices": jax.devices(),
            "cohort_size": 16 * len(jax.devices()),
            "label": "linear",
        }
        return probe.choose_lanes(training, **{**defaults, **settings})

    choose.timed, choose.file = timed, tmp_path / "lanes.json"
    return choose


def test_the_fastest_wins(choose):
    assert choose({1: 3.0, 4: 1.0, 16: 2.0}) == (4, 1, {1: 3.0, 4: 1.0, 16: 2.0})


def test_one_lane_wins_unless_more_are_clearly_faster(choose):
    assert choose({1: 1.0, 4: 0.95}).lanes == 1


def test_a_choice_is_remembered_for_the_same_work_only(choose):
    first = choose({1: 2.0, 4: 1.0})
    assert choose({1: 1.0, 4: 9.0}) == first and choose.timed == [1, 4]
    assert choose({1: 1.0, 4: 9.0}, batch_size=8).lanes == 1
    assert choose({1: 1.0, 4: 9.0}, label="other").lanes == 1
    assert len(json.loads(choose.file.read_text())) == 3


def test_a_broken_memory_is_timed_again(choose):
    choose.file.write_text("{")
    assert choose({1: 2.0, 4: 1.0}).lanes == 4
    assert json.loads(choose.file.read_text())


def test_a_single_candidate_needs_no_timing(choose):
    assert choose({5: 5.0}) == (5, 1, {}) and not choose.timed


def test_lanes_beyond_the_cohort_are_those_of_further_federations(choose):
    cohort = 4 * len(jax.devices())
    choice = choose({1: 9.0, 4: 3.0, 16: 1.0}, cohort_size=cohort, federations=8)
    assert (choice.lanes, choice.width) == (4, 4)
    alone = choose({1: 9.0, 4: 3.0, 16: 1.0}, cohort_size=cohort)
    assert (alone.lanes, alone.width) == (4, 1)
    assert choose.timed == [1, 4, 16]


def test_candidates_never_exceed_the_cohort():
    for cohort in (1, 2, 7, 32):
        tried = probe.candidates(2, cohort)
        assert tried[0] == 1 and max(tried) <= max(1, -(-cohort // 2))


def test_it_times_real_training():
    training = LocalTraining(Task(linear_model(), (0.0,), (1.0,)), "adam")
    for lanes in (1, 2):
        assert probe._seconds_per_step(training, 4, jax.devices(), lanes, 2) > 0
