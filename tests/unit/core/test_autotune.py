"""The choice of lanes: timed once, remembered, and never needed."""

import json

import jax
import pytest
from support.networks import make_linear_model

from fedjax_het.core import autotune
from fedjax_het.core.autotune import LaneChoice, Workload, load_timings
from fedjax_het.core.autotune_workloads import WorkloadMemoryError, time_client_step
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.task import Task
from fedjax_het.nn import make_model

GB = 10**9
OOM = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate")


def training(model=None, optimizer="sgd"):
    return LocalTraining(Task(model or make_linear_model(), (0.0,), (1.0,)), optimizer)


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """choose_lanes with made-up timings, by lanes or by (lanes, implementation), of which errors
    are raised; `choose.timed` lists what was timed."""
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "total_free_bytes", lambda devices: choose.free)
    timed = []

    def choose(seconds, *, label="linear", batch_size=4, images=None, model=None, **settings):
        lanes = {way if isinstance(way, int) else way[0] for way in seconds}

        def time_one(workload, impl, devices, v, clients, free):
            way = v if v in seconds else (v, impl)
            timed.append(way)
            actual = seconds[way]
            if isinstance(actual, Exception):
                raise actual
            return actual

        monkeypatch.setattr(autotune, "time_client_step", time_one)
        monkeypatch.setattr(
            autotune,
            "list_lane_counts",
            lambda devices, cohort, federations=1: [
                v for v in sorted(lanes) if v <= max(1, cohort // devices) * federations
            ],
        )
        defaults = {"devices": jax.devices(), "cohort_size": 16 * len(jax.devices())}
        work = Workload(training(model), batch_size, label, images)
        return autotune.choose_lanes(work, **{**defaults, **settings})

    choose.timed, choose.file, choose.free = timed, tmp_path / "lanes.json", 10 * GB
    return choose


@pytest.fixture
def elsewhere(monkeypatch, choose):
    """As if the devices were no CPUs, with a network of convolutions."""
    monkeypatch.setattr(autotune.jax, "default_backend", lambda: "gpu")
    convnet = make_model("convnet", (8, 8, 1), 3, width=4, depth=1)
    return lambda seconds, **settings: choose(seconds, model=convnet, **settings)


def test_fastest_lanes_win(choose):
    assert choose({1: 3.0, 4: 1.0, 16: 2.0}) == (4, 1, {1: 3.0, 4: 1.0, 16: 2.0}, "auto")
    assert choose({1: 1.0, 4: 0.95}, label="other").lanes == 1  # not clearly faster


def test_idle_lanes_weigh_timings(choose):
    """Of a step that takes a third with 16 lanes, a quarter of whose steps are some client's."""
    seconds = {1: 3.0, 4: 1.4, 16: 1.0}
    assert choose(seconds).lanes == 16
    waiting = {1: 1.0, 4: 1.2, 16: 4.0}.__getitem__
    assert choose(seconds, idle_factor=waiting).lanes == 4
    assert choose.timed == [1, 4, 16]  # timings are of no clients in particular


def test_short_runs_on_cpus_are_not_timed(choose):
    seconds = {1: 2.0, 4: 1.0}
    assert choose(seconds, count_flops=lambda: 9e10) == (1, 1, {}, "auto") and not choose.timed
    assert choose(seconds, count_flops=lambda: 0.0, label="unknown").lanes == 4
    assert choose(seconds, count_flops=lambda: 2e11).lanes == 4
    assert choose(seconds, count_flops=lambda: 9e10).lanes == 4  # by the stored timings


def test_short_runs_on_accelerators_are_timed(elsewhere):
    seconds = {(1, "native"): 3.0, (1, "im2col"): 2.0, (4, "im2col"): 1.0, (4, "unrolled"): 1.5}
    assert elsewhere(seconds, count_flops=lambda: 1.0).lanes == 4


def test_timings_are_stored_by_workload(choose):
    first = choose({1: 2.0, 4: 1.0})
    assert choose({1: 1.0, 4: 9.0}) == first and choose.timed == [1, 4]
    assert choose({1: 1.0, 4: 9.0}, batch_size=8).lanes == 1
    assert choose({1: 1.0, 4: 9.0}, label="other").lanes == 1
    assert choose({1: 1.0, 4: 9.0}, images=10).lanes == 1
    (kind,) = json.loads(choose.file.read_text())["devices"]
    assert kind == jax.devices()[0].device_kind and len(load_timings(kind)) == 4


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"linear|sgd|4": {"1": 9.0, "4": 1e-9}}',
        '{"format": 3, "devices": {"cpu": 3}}',
        '{"format": 2, "devices": {}}',
    ],
)
def test_invalid_timing_file_is_ignored(choose, text):
    choose.file.write_text(text)
    assert choose({1: 2.0, 4: 1.0}).lanes == 4
    assert choose.timed == [1, 4] and json.loads(choose.file.read_text())["format"] == 3


@pytest.mark.parametrize("entry", ['"fast"', "-1.0", "true", "null", "{}", '[2.0, "all"]'])
def test_timing_file_with_invalid_entry_is_ignored(choose, entry):
    choose({1: 2.0, 4: 1.0})
    content = json.dumps(json.loads(choose.file.read_text()))
    choose.file.write_text(content.replace(json.dumps([2.0, 0]), entry))
    assert choose({1: 2.0, 4: 1.0}).lanes == 4 and choose.timed == [1, 4, 1, 4]


def test_single_candidate_is_not_timed(choose):
    assert choose({5: 5.0}) == LaneChoice(5, 1, {}) and not choose.timed


def test_parallel_runs_use_remaining_lanes(choose):
    cohort = 4 * len(jax.devices())
    choice = choose({1: 9.0, 4: 3.0, 16: 1.0}, cohort_size=cohort, num_runs=8)
    assert (choice.lanes, choice.num_parallel) == (4, 4)
    alone = choose({1: 9.0, 4: 3.0, 16: 1.0}, cohort_size=cohort)
    assert (alone.lanes, alone.num_parallel) == (4, 1)
    assert choose.timed == [1, 4, 16]


@pytest.mark.parametrize("error", [OOM, MemoryError(), jax.errors.JaxRuntimeError("INTERNAL: no")])
def test_failed_candidate_excludes_more_lanes(choose, error):
    seconds = {1: 3.0, 4: 2.0, 16: error, 64: 0.1}
    cohort = 64 * len(jax.devices())
    choice = choose(seconds, cohort_size=cohort)
    assert (choice.lanes, choice.seconds) == (4, {1: 3.0, 4: 2.0})
    assert choose.timed == [1, 4, 16]
    assert choose(seconds, cohort_size=cohort).lanes == 4
    assert 64 not in choose.timed and choose.timed.count(1) == 1


def test_failed_candidate_is_retried_with_more_memory(choose):
    small = {1: 3.0, 4: WorkloadMemoryError(40 * GB)}
    assert choose(small).lanes == 1
    assert choose({1: 3.0, 4: 1.0}).lanes == 1 and choose.timed == [1, 4]  # it is remembered
    assert choose({1: 3.0, 4: 1.0}, memory_bytes=39 * GB).lanes == 1
    choose.free = 80 * GB
    assert choose({1: 3.0, 4: 1.0}).lanes == 4 and choose.timed == [1, 4, 4]
    choose.free = 10 * GB
    assert choose({1: 3.0, 4: 1.0}).lanes == 4  # a time is a time: the run checks its own room


def test_fewest_lanes_if_all_candidates_fail(choose):
    assert choose({1: OOM, 4: OOM}) == LaneChoice(1, 1, {})


def test_unknown_error_of_candidate_is_raised(choose):
    with pytest.raises(TypeError):
        choose({1: TypeError("a mistake"), 4: 1.0})


def test_convolutions_are_chosen_with_lanes(elsewhere, choose):
    seconds = {
        (1, "native"): 2.0,
        (1, "im2col"): 3.0,
        (4, "im2col"): 1.0,
        (4, "unrolled"): 0.7,
        (16, "im2col"): 0.9,
    }
    assert elsewhere(seconds)[::3] == (4, "unrolled") and choose.timed == sorted(
        seconds, key=lambda way: (way[0], way[1])
    )
    slow = {way: taken if way[0] == 1 else 9.0 for way, taken in seconds.items()}
    assert elsewhere(slow, label="other")[::3] == (1, "native")
    work = Workload(training(), 4, "linear")
    known = [autotune.lookup_conv_impl(work, jax.devices(), lanes) for lanes in (1, 4, 16, 64)]
    assert known == ["native", "unrolled", "im2col", "auto"]


def test_failed_convolution_keeps_others(elsewhere):
    seconds = {(1, "native"): OOM, (1, "im2col"): 3.0, (4, "im2col"): 1.0, (4, "unrolled"): OOM}
    assert elsewhere(seconds) == (4, 1, {1: 3.0, 4: 1.0}, "im2col")


def test_lane_counts_fit_cohort():
    for cohort in (1, 2, 7, 32):
        tried = autotune.list_lane_counts(2, cohort)
        assert tried[0] == 1 and max(tried) <= max(1, -(-cohort // 2))


@pytest.mark.parametrize("images", [None, 3])
def test_time_client_step(images):
    model = make_model("mlp", (4, 4, 1), 3, hidden=(5,))
    work = Workload(training(model, "adam"), 4, "mlp", images)
    for lanes in (1, 2):
        assert time_client_step(work, "auto", jax.devices(), lanes, 2, None) > 0


def test_time_client_step_requires_memory(monkeypatch):
    monkeypatch.setattr("fedjax_het.core.autotune_workloads._time_fastest_call", None)
    with pytest.raises(WorkloadMemoryError) as refused:
        time_client_step(Workload(training(), 4, "linear"), "auto", jax.devices(), 2, 2, 1000)
    assert refused.value.needed_bytes > 1000
