"""The report of devices, the settings that help there, and hardware that jax does not use."""

import logging
import sys
from types import SimpleNamespace

import jax
import pytest
from support.data import make_user_dataset
from support.small_runs import make_spec, run_spec, run_sweep

import fedjax_het
from fedjax_het import Placement, simulate
from fedjax_het.cli import main
from fedjax_het.core.autotune import Timing, save_timings
from fedjax_het.runtime import device_report
from fedjax_het.runtime.device_report import (
    describe_devices,
    describe_unused_hardware,
    find_replaced_modules,
    recommend_settings,
    show_environment,
)

GRAPHS = "XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
VERSION = "proc/driver/nvidia/version=NVRM version: "
DRIVER = VERSION + "NVIDIA UNIX x86_64 Kernel Module  {}.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
OPEN_DRIVER = VERSION + "NVIDIA UNIX Open Kernel Module for x86_64  {}.65.06  Release Build\n"


@pytest.fixture(autouse=True)
def new_process(monkeypatch, tmp_path):
    """As in a new process with a cache of its own, without flags and without plugins."""
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path / "cache"))
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    caches = device_report.warn_unused_hardware, device_report._get_library_versions
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(device_report, "_get_installed_version", lambda name: None)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def unused_gpu(monkeypatch):
    monkeypatch.setattr(device_report, "describe_unused_hardware", lambda: "there is a GPU")


def make_gpu(**stats):
    """Return a GPU as jax shows it."""
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    return SimpleNamespace(
        id=3, platform="gpu", device_kind="NVIDIA H200", client=client, memory_stats=lambda: stats
    )


def test_recommended_settings_depend_on_backend_and_flags(monkeypatch):
    assert recommend_settings("cpu") == {}
    missing = recommend_settings("gpu", 12090)
    assert len(missing) == 3 and GRAPHS in missing
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9" in missing
    assert GRAPHS in recommend_settings("gpu", 12030)
    assert GRAPHS not in recommend_settings("gpu", 12020)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    missing = recommend_settings("gpu", 12090)
    assert GRAPHS not in missing and len(missing) == 1


def test_devices_command_reports_devices_and_timings(capsys, unused_gpu):
    kind = jax.devices()[0].device_kind
    timings = {"1 native": Timing(0.0123), "4 im2col": Timing(None, 10**9)}
    label = "convnet (('norm', 'batch'), ('width', 8)) (8, 8, 1) 3 highest x64"
    save_timings(kind, f"0.10.2|{label}|sgd|batch 32", timings)
    save_timings(kind, "0.10.2|other|sgd|batch 32", timings)
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out and f"{len(jax.devices())} x {kind}" in out
    assert "precision: float32 (set in jax: highest)" in out
    words = "inputs 8x8x1, 3 outputs, precision highest x64"
    assert f"  convnet norm=batch width=8, {words}, sgd, batch 32\n" in out
    assert "  other, sgd, batch 32\n" in out
    assert "1 native: 12.3, 4 im2col: too large, or failed" in out
    assert "note: there is a GPU" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_report_of_an_accelerator_has_memory_and_flags(monkeypatch):
    monkeypatch.setattr(device_report.jax, "default_backend", lambda: "gpu")
    with jax.default_matmul_precision(None):
        lines = list(describe_devices([make_gpu(bytes_limit=140 * 10**9, bytes_in_use=10**10)]))
    text = "\n".join(lines)
    assert "1 x NVIDIA H200, CUDA 12.9" in text
    assert "memory of device 3: 130.0 of 140.0 GB free" in text
    assert "products of tf32" in text and f"recommended: {GRAPHS}" in text
    assert "unknown" in "\n".join(describe_devices([make_gpu()]))


# --- hardware that jax does not use


def make_file_system(root, *files):
    for file in files:
        name, _, text = file.partition("=")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


CUDA = {
    "device": (("dev/nvidia0", "dev/nvidiactl"), 12),
    "old driver": ((DRIVER.format(550),), 12),
    "new driver": (("dev/nvidia3", DRIVER.format(580)), 13),
    "open driver": ((OPEN_DRIVER.format(590),), 13),
    "Windows": (("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), 12),
}


@pytest.mark.parametrize("case", CUDA)
def test_unused_gpu_is_reported_with_the_command(case, tmp_path):
    files, cuda = CUDA[case]
    line = describe_unused_hardware(make_file_system(tmp_path, *files), {})
    assert "NVIDIA GPU" in line and "\n" not in line
    assert f'pip install "jax[cuda{cuda}]=={jax.__version__}"' in line and "restart" in line


def test_installed_plugin_decides_the_cuda_version(tmp_path, monkeypatch):
    versions = {"jax-cuda12-plugin": "0.7.2"}
    monkeypatch.setattr(device_report, "_get_installed_version", versions.get)
    root = make_file_system(tmp_path, "dev/nvidia0", DRIVER.format(590))
    assert "jax[cuda12]" in describe_unused_hardware(root, {})


@pytest.mark.parametrize(
    ("files", "environment"),
    [
        (("dev/accel0",), {}),
        (("dev/vfio/0", "sys/bus/pci/devices/0000:00:05.0/vendor=0x1ae0\n"), {}),
        ((), {"TPU_ACCELERATOR_TYPE": "v5litepod-1"}),
        ((), {"COLAB_TPU_ADDR": "10.0.0.2:8470"}),
    ],
)
def test_unused_tpu_is_reported(files, environment, tmp_path):
    line = describe_unused_hardware(make_file_system(tmp_path, *files), environment)
    assert "a TPU" in line and f"jax[tpu]=={jax.__version__}" in line


@pytest.mark.parametrize(
    ("files", "environment"),
    [
        ((), {}),
        (("dev/nvidia-caps", "dev/null", "dev/accel/accel0"), {}),
        (("dev/vfio/0", "sys/bus/pci/devices/0000:00:05.0/vendor=0x8086\n"), {}),
        (("dev/dxg",), {}),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": ""}),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1"}),
        (("dev/nvidia0",), {"JAX_PLATFORMS": "cpu"}),
    ],
)
def test_absent_or_hidden_hardware_is_not_reported(files, environment, tmp_path, monkeypatch):
    assert describe_unused_hardware(make_file_system(tmp_path, *files), environment) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # jax uses the GPU
    assert describe_unused_hardware(make_file_system(tmp_path, "dev/nvidia0"), {}) is None


@pytest.mark.slow
def test_runs_warn_of_unused_hardware_once(unused_gpu, caplog):
    placement = Placement(devices=jax.devices("cpu")[:1])  # the user chose the CPU
    simulate(make_spec(rounds=1), dataset=make_user_dataset(), placement=placement)
    assert "there is a GPU" not in caplog.text
    with caplog.at_level(logging.WARNING):
        run_spec(make_spec(rounds=1))
        run_sweep([make_spec(rounds=1)])
    warnings = [record for record in caplog.records if "there is a GPU" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].name == "fedjax_het"


def test_replaced_modules_are_found(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(__version__="2.0.2"))
    monkeypatch.setattr(device_report, "_get_installed_version", {"numpy": "2.4.1"}.get)
    assert find_replaced_modules() == ["numpy 2.0.2 is imported, 2.4.1 installed"]
    monkeypatch.undo()
    assert find_replaced_modules() == []


def test_environment_shows_versions_devices_and_actions(monkeypatch, capsys):
    show_environment()
    (line,) = capsys.readouterr().out.splitlines()
    assert fedjax_het.__version__ in line and jax.__version__ in line
    assert repr(jax.devices()[0]) in line
    monkeypatch.setattr(device_report, "describe_unused_hardware", lambda: "there is a GPU")
    replaced = ["numpy 1 is imported, 2 installed"]
    monkeypatch.setattr(device_report, "find_replaced_modules", lambda: replaced)
    fedjax_het.show_environment()
    _, restart, note = capsys.readouterr().out.splitlines()
    assert restart.startswith("Restart the runtime") and "numpy 1" in restart
    assert note == "Note: there is a GPU."


def test_library_versions_are_read_once(monkeypatch):
    environment = device_report.describe_environment()
    monkeypatch.setattr(device_report, "_get_installed_version", pytest.fail)
    assert device_report.describe_environment() == environment
