"""A sweep as tasks: cut into parts, lost ones made again, the same results."""

import functools
import os
import signal
import sys
import threading
import time

import pytest
from support.data import make_user_dataset
from support.paths import ROOT, TESTS
from support.small_runs import assert_all_equal, make_spec, with_placement

from fedjax_het import ConfigError, Placement, RunSpec, sweep
from fedjax_het.runtime import ray_launcher
from fedjax_het.runtime.ray_launcher import TaskLostError, split_into_parts, sweep_on_ray
from fedjax_het.runtime.result_store import load_results
from fedjax_het.runtime.signature import compute_static_key

SPECS = [make_spec(seed=s) for s in range(4)]
SAME = {
    "dataset": make_user_dataset(),
    **with_placement({"lanes": 1, "blocks": 1, "spread": "runs"}),
}


class Tasks:
    """A cluster that executes a task in this process when its result is requested.

    lose: function of a part that returns whether its machine is lost.
    apart: whether machines have other folders.
    """

    def __init__(self, lose=lambda part: False, apart=False):
        self.lose, self.apart, self.submitted, self.closed = lose, apart, [], False

    def count_slots(self):
        return 2

    def submit(self, function, *arguments):
        if function is ray_launcher.execute_part:
            self.submitted.append(arguments[0])
            if self.apart:  # a machine that does not have the folder
                arguments = (arguments[0]._replace(marker_file="/nowhere"),)
        return functools.partial(function, *arguments)

    def wait_for_first(self, tickets):
        return tickets[-1]

    def get(self, ticket):
        if ticket.func is ray_launcher.execute_part and self.lose(ticket.args[0]):
            raise TaskLostError("the node died")
        return ticket()

    def close(self):
        self.closed = True


def sweep_as_tasks(cluster, specs, directory, **settings):
    """Execute a sweep on a cluster in place of Ray's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_launcher, "RayCluster", lambda *arguments: cluster)
        return sweep_on_ray(specs, directory, **settings)


def seeds(part):
    return [one.seed for one in part.specs_by_digest.values()]


@pytest.mark.parametrize("apart", [False, True])
def test_tasks_return_the_results_of_a_sweep(tmp_path, apart):
    lines, cluster = [], Tasks(apart=apart)
    sweep_result = sweep_as_tasks(cluster, SPECS, tmp_path, progress=lines.append, **SAME)
    assert sorted(map(seeds, cluster.submitted)) == [[0], [1], [2], [3]] and cluster.closed
    assert [line[:5] for line in lines] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert lines[-1].endswith("; done")
    assert_all_equal(sweep_result.results, sweep(SPECS, progress=None, **SAME).results)
    assert sorted(load_results(tmp_path)["seed"]) == [0, 1, 2, 3]
    assert not list(tmp_path.glob(".shared*")) and not (tmp_path / "claims").exists()
    again = sweep_as_tasks(Tasks(), SPECS, tmp_path, progress=lines.append, **SAME)
    assert lines[-1] == f"4 of 4 runs are in {tmp_path} already" and all(again.results)


def test_lost_part_is_repeated(tmp_path):
    lines, lost = [], iter([True, False, True])
    cluster = Tasks(lose=lambda part: next(lost, False))
    sweep_result = sweep_as_tasks(cluster, SPECS, tmp_path, progress=lines.append, **SAME)
    assert all(sweep_result.results) and len(cluster.submitted) == 4 + 2
    assert sum("a task of 1 runs was lost (the node died): executed again" in s for s in lines) == 2


def test_part_is_lost_too_often(tmp_path):
    cluster = Tasks(lose=lambda part: True)
    with pytest.raises(TaskLostError):
        sweep_as_tasks(cluster, SPECS[:1], tmp_path, progress=None, **SAME)
    assert len(cluster.submitted) == ray_launcher.MAX_ATTEMPTS and cluster.closed


def test_exception_of_a_task_is_raised_at_the_end(tmp_path):
    def fail(part):
        if seeds(part) == [3]:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        sweep_as_tasks(Tasks(lose=fail), SPECS, tmp_path, progress=None, **SAME)
    assert sorted(load_results(tmp_path)["seed"]) == [0, 1, 2]


def test_missing_data_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.delenv("CINIC10_DIR", raising=False)
    specs = [RunSpec("fedavg", "cinic10", model="mlp", seed=seed) for seed in (0, 1)]
    lines = []
    sweep_result = sweep_as_tasks(Tasks(), specs, tmp_path, progress=lines.append)
    assert sweep_result.results == [None, None] and set(sweep_result.not_run) == {
        s.digest() for s in specs
    }
    assert sum("not run" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("max_parts", "min_size", "sizes"),
    [(1, 1, [8]), (4, 1, [2, 2, 2, 2]), (100, 1, [1] * 8), (100, 4, [4, 4]), (3, 16, [8])],
)
def test_split_into_parts_sizes(max_parts, min_size, sizes):
    specs = {str(s): make_spec(seed=s).resolved() for s in range(8)}
    parts = list(split_into_parts(specs, max_parts, min_size))
    assert [len(part) for part in parts] == sizes
    assert {digest: spec for part in parts for digest, spec in part.items()} == specs


def test_split_into_parts_by_signature():
    specs = [make_spec(seed=s, batch_size=b) for b in (4, 5) for s in range(3)]
    parts = list(split_into_parts({str(i): s.resolved() for i, s in enumerate(specs)}, 1, 1))
    assert [len({compute_static_key(spec) for spec in part.values()}) for part in parts] == [1, 1]
    assert [len(part) for part in parts] == [3, 3]


def test_invalid_arguments_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for settings, expected in [
        ({"cpus_per_task": 0}, "cpus_per_task = 0"),
        ({"gpus_per_task": -1}, "gpus_per_task = -1"),
        ({}, r"pip install 'fedjax_het\[ray\]'"),
        ({"placement": Placement(devices=1)}, "devices"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            sweep_on_ray(SPECS, tmp_path, **settings)


@pytest.mark.long
def test_ray_with_killed_processes(tmp_path):
    """48 runs on a local cluster of four slots, three of whose processes are killed."""
    import psutil
    import ray

    support = os.pathsep.join([str(ROOT), str(TESTS)])
    specs = [make_spec(seed=s, rounds=40) for s in range(48)]
    ray.init(num_cpus=4, runtime_env={"env_vars": {"PYTHONPATH": support}}, logging_level="error")
    lines, killed = [], []

    def kill():
        while len(killed) < 3:
            time.sleep(3)
            tasks = [
                process
                for process in psutil.Process().children(recursive=True)
                if "ray::" in " ".join(process.cmdline()) and "execute_part" in process.cmdline()[0]
            ]
            if tasks and any(line.startswith("[") for line in lines):
                tasks[len(killed) % len(tasks)].send_signal(signal.SIGKILL)
                killed.append(True)

    try:
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        began = time.perf_counter()
        sweep_result = sweep_on_ray(specs, tmp_path, progress=lines.append, **SAME)
        print(f"{time.perf_counter() - began:.1f} s, killed {len(killed)}")
    finally:
        ray.shutdown()
    assert sum("executed again" in line for line in lines) == len(killed) > 0
    assert sorted(load_results(tmp_path)["seed"]) == list(range(48))
    assert not (tmp_path / "claims").exists()
    assert_all_equal(sweep_result.results, sweep(specs, progress=None, **SAME).results)
