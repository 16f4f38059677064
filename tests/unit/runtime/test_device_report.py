"""What a user is told of the devices, and the flags that help there."""

from types import SimpleNamespace

import jax
import pytest

from fedjax_het.cli import main
from fedjax_het.core.autotune import Timing, save_timings
from fedjax_het.runtime import device_report
from fedjax_het.runtime.device_report import describe_devices, recommend_settings

GRAPHS = "XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path))
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


def accelerator(**stats):
    """As jax shows a GPU."""
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    return SimpleNamespace(
        id=3, platform="gpu", device_kind="NVIDIA H200", client=client, memory_stats=lambda: stats
    )


def settings(found):
    return [each.setting for each in found if not each.is_set]


def test_a_cpu_needs_no_flags():
    assert recommend_settings("cpu") == []


def test_a_gpu_is_advised_what_it_lacks(monkeypatch):
    wanted = settings(recommend_settings("gpu", 12090))
    assert len(wanted) == 3 and GRAPHS in wanted
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9" in wanted
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert GRAPHS not in settings(recommend_settings("gpu", 12090))
    assert len(settings(recommend_settings("gpu", 12090))) == 1


def test_loops_in_graphs_need_a_cuda_that_has_them():
    assert GRAPHS in settings(recommend_settings("gpu", 12030))
    assert GRAPHS not in settings(recommend_settings("gpu", 12020))


def test_the_command_says_what_runs_go_on(capsys):
    kind = jax.devices()[0].device_kind
    found = {"1 native": Timing(0.0123), "4 im2col": Timing(None, 10**9)}
    save_timings(kind, "0.10.2|convnet () (8, 8, 1) 3|sgd|batch 32", found)
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out and f"{len(jax.devices())} x {kind}" in out
    assert "precision: float32 (asked for by jax: highest)" in out
    assert "convnet () (8, 8, 1) 3, sgd, batch 32" in out
    assert "1 native: 12.3, 4 im2col: too large, or failed" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_of_an_accelerator_it_says_memory_and_flags(monkeypatch):
    monkeypatch.setattr(device_report.jax, "default_backend", lambda: "gpu")
    with jax.default_matmul_precision(None):
        lines = list(describe_devices([accelerator(bytes_limit=140 * 10**9, bytes_in_use=10**10)]))
    text = "\n".join(lines)
    assert "1 x NVIDIA H200, CUDA 12.9" in text
    assert "memory of device 3: 130.0 of 140.0 GB free" in text
    assert "products of tf32" in text and f"would help: {GRAPHS}" in text
    assert "unknown" in "\n".join(describe_devices([accelerator()]))


def test_hardware_that_is_not_used_is_told(monkeypatch, capsys):
    monkeypatch.setattr(device_report, "describe_unused_hardware", lambda: "there is a GPU")
    assert main(["devices"]) == 0
    assert "note: there is a GPU" in capsys.readouterr().out
