"""Several processes are as one; eight devices are as one."""

import socket
import subprocess

import numpy as np
import pytest
from support.markers import long_case, slow_case
from support.paths import WORKERS
from support.processes import start_python

from fedjax_het.runtime.result_store import load_results

WORKER = WORKERS / "distributed_worker.py"


def start(folder, count, index, port, method, devices):
    words = [WORKER, folder, f"127.0.0.1:{port}", count, index, method]
    return start_python(*words, output=subprocess.PIPE, JAX_NUM_CPU_DEVICES=str(devices))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def finish(processes):
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(texts)


def assert_close(actual, expected):
    actual, expected = np.load(actual), np.load(expected)
    for name in expected.files:
        np.testing.assert_allclose(actual[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("method", [slow_case("scaffold"), long_case("dynafed")])
def test_two_processes_are_as_one(tmp_path, method):
    port = free_port()
    finish([start(tmp_path / "two", 2, index, port, method, devices=1) for index in (0, 1)])
    finish([start(tmp_path / "one", 1, 0, port, method, devices=2)])
    for index in (0, 1):
        actual = tmp_path / "two" / f"metrics-2-{index}.npz"
        assert_close(actual, tmp_path / "one" / "metrics-1-0.npz")
    # Written once; and a sweep's runs are shared out.
    assert len(list((tmp_path / "two" / "run").glob("*.json"))) == 1
    counts = [int((tmp_path / "two" / f"made-2-{index}").read_text()) for index in (0, 1)]
    assert sum(counts) == 5
    here, there = (load_results(tmp_path / name / "sweep") for name in ("two", "one"))
    assert len(here) == len(there) == 5
    columns = ["seed", "final_accuracy"]
    np.testing.assert_allclose(
        here[columns].sort_values("seed"), there[columns].sort_values("seed")
    )


@pytest.mark.slow
def test_eight_devices_are_as_one(tmp_path):
    for devices in (1, 8):
        finish([start(tmp_path / str(devices), 1, 0, 0, "scaffold", devices)])
    assert_close(tmp_path / "8" / "metrics-1-0.npz", tmp_path / "1" / "metrics-1-0.npz")
