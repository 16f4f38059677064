"""Sweeps execute every run once, in groups, with the results of single runs."""

import contextlib
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import method_cases, slow_case
from support.small_runs import (
    KilledError,
    assert_all_equal,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    run_sweep,
)

from fedjax_het import ConfigError, Placement, Result, RunSpec
from fedjax_het.algorithms import METHODS
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.memory import usable_free_bytes
from fedjax_het.runtime import sweep as sweep_module
from fedjax_het.runtime import work_queue
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import init_group
from fedjax_het.runtime.program_memory import measure_required_memory
from fedjax_het.runtime.result_store import load_results
from fedjax_het.runtime.sweep import plan_sweep
from fedjax_het.runtime.work_queue import Job, SweepProgress

SPECS = [
    make_spec(seed=0),
    make_spec(seed=1, hp={"local_lr": 0.01}),
    make_spec(seed=2, partition="dirichlet", alpha=0.5),
    make_spec(seed=3, partition="dirichlet", alpha=5.0, averaging="weighted"),
    make_spec(seed=4),
]


def assert_close(a, b):
    for name in a.metrics:
        np.testing.assert_allclose(
            a.metrics[name], b.metrics[name], rtol=2e-4, atol=1e-6, err_msg=name
        )


# --- results of runs -------------------------------------------------------------------------


@pytest.mark.parametrize("name", method_cases(quick=["fedavg"]))
def test_result_is_independent_of_other_runs(name):
    has_server_lr = METHODS[name].has_global_model or METHODS[name].local_parameters is not None
    number = "server_lr" if has_server_lr else "local_lr"
    specs = [
        make_spec(name, seed=0),
        make_spec(name, seed=1, partition="dirichlet", alpha=0.5),
        make_spec(name, seed=2, hp={number: 0.7}),
    ]
    together = run_sweep(specs, spread="runs").results
    for one, result in zip(specs, together, strict=True):
        assert_results_equal(run_sweep([one], spread="runs").results[0], result)
        assert_close(run_spec(one), result)
    assert_results_equal(run_sweep(specs[::-1], spread="runs").results[0], together[-1])


@pytest.mark.parametrize(
    ("name", "lanes"), [*method_cases(METHODS, 1, quick=[]), slow_case("fedavg", 2)]
)
def test_vmapped_runs_equal_sequential_runs(name, lanes):
    specs = [make_spec(name, seed=s, partition="dirichlet", alpha=0.7) for s in range(5)]
    in_turn = run_sweep(specs, spread="runs", width=1, lanes=lanes).results
    vmapped = run_sweep(specs, spread="runs", width=3, lanes=lanes).results
    assert vmapped[0].summary["lanes"] != in_turn[0].summary["lanes"]
    for a, b in zip(in_turn, vmapped, strict=True):
        assert_close(a, b)


def test_runs_of_one_signature_share_a_program(no_program_eviction):
    specs = [
        RunSpec(**{**vars(one), "local_epochs": 4}) for one in SPECS
    ]  # no other test's program
    results = run_sweep(specs, spread="runs", lanes=1).results  # auto may time another number
    assert all(result is not None for result in results)
    plan = UserObjects(make_user_dataset()), Placement(spread="runs", lanes=1)
    program = prepare_group(specs, *plan).program
    assert program is prepare_group(specs[:1], *plan).program
    assert program.chunk.program._cache_size() == 1


def test_static_settings_separate_groups():
    keys = {
        sweep_module.compute_static_key(one.resolved())
        for one in (*SPECS, make_spec(batch_size=5), make_spec("fedprox"), make_spec(rounds=3))
    }
    assert len(keys) == 4


# --- groups ---------------------------------------------------------------------------------


def test_runs_are_spread_if_no_device_idles():
    count = len(jax.devices())
    spreads = [
        prepare_group(SPECS[:1] * n, UserObjects(make_user_dataset())).program.plan.mesh_axis
        for n in (1, 4 * count)
    ]
    assert spreads[0] == "lanes"
    assert count == 1 or spreads[1] == "runs"


def make_groups(count):
    program = SimpleNamespace(plan=make_execution_plan(1))
    return [SimpleNamespace(program=program, number=i) for i in range(count)]


def test_next_group_compiles_during_a_group(monkeypatch):
    groups, compiling = make_groups(3), []
    started = [threading.Event() for _ in groups]

    def compile_group(group, available_bytes):
        compiling.append(group)
        started[group.number].set()
        time.sleep(0.1)
        compiling.remove(group)
        return group

    def prepare():
        for i, group in enumerate(groups):
            assert not compiling
            yield [i], group

    monkeypatch.setattr(sweep_module, "_fit_to_memory", compile_group)
    numbers = []
    for (number,), _ in sweep_module._precompile_groups(prepare(), None):
        numbers.append(number)
        if number < 2:  # while this group "runs"
            assert started[number + 1].wait(60)
    assert numbers == [0, 1, 2]


def test_compilation_error_is_raised_in_order(monkeypatch):
    def compile_group(group, available_bytes):
        if group is second:
            raise RuntimeError("no program")
        return group

    first, second = make_groups(2)
    monkeypatch.setattr(sweep_module, "_fit_to_memory", compile_group)
    groups = sweep_module._precompile_groups([([0], first), ([1], second)], None)
    assert next(groups) == ([0], first)
    with pytest.raises(RuntimeError, match="no program"):
        next(groups)


def get_buffers(group):
    """Addresses of the training and test images on each device, by input."""
    return {
        name: [s.data.unsafe_buffer_pointer() for s in placed.inputs.addressable_shards]
        for name, placed in group.shared_inputs.items()
        if name in ("examples", "test_set")
    }


@pytest.mark.slow
def test_large_group_is_split(monkeypatch, caplog):
    specs = [make_spec(seed=s) for s in range(4 * len(jax.devices()))]
    group = prepare_group(
        specs, UserObjects(make_user_dataset()), placement=Placement(spread="runs", width=4)
    )
    estimated = init_group(group, group.prepared_runs)
    needed = measure_required_memory(estimated)
    assert estimated.state is None, "an estimate allocates nothing"
    fits = sweep_module._fit_to_memory(group, int(needed * 1.01))
    assert fits.program.plan.num_parallel == 4
    halved = sweep_module._fit_to_memory(group, int(needed * 0.6))
    assert halved.program.plan.num_parallel in (1, 2) and halved.program.plan.mesh_axis == "runs"
    first = init_group(halved, group.prepared_runs[: halved.program.plan.max_parallel_runs])
    assert measure_required_memory(first) < 0.6 * needed
    assert get_buffers(halved) == get_buffers(group)
    single = sweep_module._fit_to_memory(group, 1)
    assert single.program.plan.mesh_axis == "lanes"
    assert get_buffers(single)["examples"][0] == get_buffers(group)["examples"][0]
    results = run_sweep(specs, spread="runs", width=4, memory=int(needed * 0.6)).results
    assert_close(results[0], run_spec(specs[0]))


@pytest.mark.slow
def test_memory_estimate_counts_client_states():
    def needed(width):
        specs = [make_spec("scaffold", seed=s) for s in range(width * len(jax.devices()))]
        placement = Placement(spread="runs", width=width)
        group = prepare_group(specs, UserObjects(make_user_dataset()), placement=placement)
        return measure_required_memory(init_group(group, group.prepared_runs))

    one, three = needed(1), needed(3)
    model = 4 * sum(a * b + b for a, b in ((4, 128), (128, 128), (128, 3)))
    state = 6 * 3 * model  # of each client: a control and Adam's two moments
    assert three - one >= 2 * state
    assert usable_free_bytes(jax.local_devices()) > three


# --- a folder of results ---------------------------------------------------------------------


def test_sweep_logs_repeated_warnings_once(caplog):
    """Partitions of one seed that leave clients empty, in two groups of two runs."""
    settings = {"partition": "dirichlet", "alpha": 0.01, "num_clients": 40, "rounds": 1}
    hps = ({"local_lr": 0.1}, {"local_lr": 0.2})
    run_sweep([make_spec(hp=hp, batch_size=n, **settings) for hp in hps for n in (4, 5)])
    lines = [line for line in caplog.messages if "hold no examples" in line]
    assert len(lines) == 2 and lines[1].startswith("4 times: partition 'dirichlet'")


def test_run_is_executed_once(tmp_path):
    lines = []
    first = run_sweep([*SPECS, SPECS[0]], tmp_path, progress=lines.append)
    assert len(first.results) == 6 and first.results[0] is first.results[5]
    assert len(lines) == 5 and lines[0].startswith(
        "[1/5] fedavg, user, mlp, partition iid, averaging uniform, protocol dynafed, seed 0: "
    )
    assert lines[-1].endswith("; done")
    again = run_sweep(SPECS, tmp_path, progress=lines.append)
    assert lines[-1] == f"5 of 5 runs are in {tmp_path} already"
    assert_all_equal(first.results[:5], again.results)
    assert list(load_results(tmp_path)["digest"]) == sorted(r.digest() for r in again.results)
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "client_state"), [("runs", "device"), ("lanes", "device"), ("runs", "host")]
)
def test_killed_sweep_resumes_to_the_same_bits(tmp_path, monkeypatch, eager, spread, client_state):
    settings = {"spread": spread, "client_state": client_state}
    whole = run_sweep(SPECS, spread=spread, client_state="device").results
    at_once = len(jax.devices()) if spread == "runs" else 1
    show = make_killing_callback(5 + 3)  # five chunks for the first runs, three for the next
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(work_queue, "show_progress", lambda *a, **k: contextlib.nullcontext(show))
        run_sweep(SPECS, tmp_path, **settings)
    assert len(load_results(tmp_path)) == at_once
    states = [state for *_, state in plan_sweep(SPECS, tmp_path, dataset=make_user_dataset())]
    assert states.count("done") == states.count("unfinished") == at_once
    resumed = run_sweep(SPECS, tmp_path, **settings).results
    assert {result.summary["client_state"] for result in resumed} == {client_state}
    assert_all_equal(resumed, whole)


@pytest.mark.slow
def test_digest_depends_on_environment_and_data(tmp_path, monkeypatch):
    results = run_sweep(SPECS[:1], tmp_path).results[0]
    names = {results.digest()}
    for name in ("fedjax_het", "device", "matmul_precision", "x64", "dataset_digest"):
        results.summary[name] = "another"
        names.add(results.digest())
    assert len(names) == 6
    results.summary["jax"] = "another"
    assert results.digest() in names
    other = make_user_dataset((9,) * 6)
    again = run_sweep(SPECS[:1], tmp_path, dataset=other).results[0]
    assert again.summary["partition_digest"] != results.summary["partition_digest"]
    assert len(list(tmp_path.glob("*.json"))) == 2


# --- rejected runs ---------------------------------------------------------------------------


def test_missing_data_rejects_only_its_runs(monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.delenv("CINIC10_DIR", raising=False)
    absent = [RunSpec("fedavg", "cinic10", model="mlp", seed=seed) for seed in (0, 1)]
    impossible = make_spec(partition="classes_per_client", classes=4)  # the data have three
    lines = []
    sweep_result = run_sweep([*absent, impossible, SPECS[0]], progress=lines.append)
    assert [result is None for result in sweep_result.results] == [True, True, True, False]
    assert set(sweep_result.not_run) == {one.digest() for one in (*absent, impossible)}
    assert "classes" in sweep_result.not_run[impossible.digest()]
    (line,) = (line for line in lines if "CINIC10_DIR" in line)
    assert "and 1 more: not run: " in line


@pytest.mark.slow
def test_missing_server_data_rejects_only_its_runs(tmp_path):
    server = {"protocol": "fsl", "partition": "iid", "pretrain_epochs": 0, "rounds": 2}
    specs = [
        make_spec("fsl", server_data="stl10", **server),  # of another shape, and not prepared
        make_spec("fsl", server_data="clients", server_options={"per_client": 40}, **server),
        make_spec("fsl", server_options={"size": 6}, **server),
    ]
    lines = []
    sweep_result = run_sweep(specs, data_dir=tmp_path, progress=lines.append)
    assert [result is None for result in sweep_result.results] == [True, True, False]
    reasons = [sweep_result.not_run[one.digest()] for one in specs[:2]]
    assert "format of the source's images" in reasons[0] and "at least 40 examples" in reasons[1]
    assert sum("not run" in line for line in lines) == 2


def test_invalid_setting_stops_before_the_first_run(tmp_path):
    bad = RunSpec.from_dict({"model": "mlp", "alpha": -1.0})
    with pytest.raises(ConfigError, match="alpha"):
        run_sweep([SPECS[0], bad], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    for name, settings in {
        "spread": {"spread": "rounds"},
        "width": {"width": 0},
        "output_dir": {"directory": tmp_path / "file" / "x"},
    }.items():
        with pytest.raises(ConfigError, match=name):
            run_sweep(SPECS, **settings)


def test_remaining_time_is_that_of_similar_runs(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(work_queue.time, "perf_counter", lambda: now[0])
    jobs = [Job(one.resolved(), "") for one in SPECS[:4]]
    account = SweepProgress(6, 0, None, lines.append)

    def make_results(seconds):
        summary = {"final_accuracy": 0.5, "diverged": False, "wall_seconds": seconds}
        return [Result(SPECS[0], {}, summary)] * 2

    now[0] = 8.0
    account.report_finished(jobs[:2], make_results(4.0), jobs[2:])
    assert lines[0] == "[1/6] fedavg, user, mlp, protocol dynafed, seed 0: 50.00 % in 4.0 s"
    now[0] = 12.0
    account.report_finished(jobs[2:], make_results(2.0))
    assert lines[-1].endswith("in 2.0 s; about 6.0 s to go")  # two of another kind: the mean so far
