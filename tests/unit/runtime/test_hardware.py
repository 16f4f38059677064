"""What is said where there is hardware that jax does not use."""

import logging
import sys
from types import SimpleNamespace

import jax
import pytest
from support.data import make_user_dataset
from support.small_runs import make_spec, run_spec

import fedjax_het
from fedjax_het import Placement, simulate, sweep
from fedjax_het.runtime import device_report as hardware
from fedjax_het.runtime.device_report import (
    describe_unused_hardware,
    find_replaced_modules,
    show_environment,
)

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}.65.06  Release Build\n"


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    """As in a new process, which did not ask for the CPU."""
    hardware.warn_unused_hardware.cache_clear()
    monkeypatch.setattr(hardware, "_get_installed_version", lambda name: None)
    yield
    hardware.warn_unused_hardware.cache_clear()


def machine(root, *files):
    for file in files:
        name, _, text = file.partition("=")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GPU = {
    "device": (("dev/nvidia0", "dev/nvidiactl"), 12),
    "old driver": (("proc/driver/nvidia/version=" + DRIVER.format(550),), 12),
    "new driver": (("dev/nvidia3", "proc/driver/nvidia/version=" + DRIVER.format(580)), 13),
    "open driver": (("proc/driver/nvidia/version=" + OPEN.format(590),), 13),
    "Windows": (("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), 12),
}


@pytest.mark.parametrize("kind", GPU)
def test_a_gpu_that_is_not_used_is_told_with_the_command(kind, tmp_path):
    files, cuda = GPU[kind]
    line = describe_unused_hardware(machine(tmp_path, *files), {})
    assert "NVIDIA GPU" in line and "\n" not in line
    assert f'pip install "jax[cuda{cuda}]=={jax.__version__}"' in line and "restart" in line


def test_the_plugin_that_is_there_says_which_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(
        hardware,
        "_get_installed_version",
        lambda name: "0.7.2" if name == "jax-cuda12-plugin" else None,
    )
    there = machine(tmp_path, "dev/nvidia0", "proc/driver/nvidia/version=" + DRIVER.format(590))
    assert "jax[cuda12]" in describe_unused_hardware(there, {})


@pytest.mark.parametrize(
    ("files", "environment"),
    [
        (("dev/accel0",), {}),
        (("dev/vfio/0", "sys/bus/pci/devices/0000:00:05.0/vendor=0x1ae0\n"), {}),
        ((), {"TPU_ACCELERATOR_TYPE": "v5litepod-1"}),
        ((), {"COLAB_TPU_ADDR": "10.0.0.2:8470"}),
    ],
)
def test_a_tpu_that_is_not_used_is_told(files, environment, tmp_path):
    line = describe_unused_hardware(machine(tmp_path, *files), environment)
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
def test_nothing_is_told_where_nothing_is_amiss(files, environment, tmp_path):
    assert describe_unused_hardware(machine(tmp_path, *files), environment) is None


def test_nothing_is_told_where_it_is_used(tmp_path, monkeypatch):
    there = machine(tmp_path, "dev/nvidia0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert describe_unused_hardware(there, {}) is None


def test_runs_and_sweeps_say_it_once(monkeypatch, caplog):
    monkeypatch.setattr(hardware, "describe_unused_hardware", lambda: "there is a GPU")
    with caplog.at_level(logging.WARNING):
        run_spec(make_spec(rounds=1))
        sweep([make_spec(rounds=1)], dataset=make_user_dataset(), progress=lambda line: None)
    told = [record for record in caplog.records if "there is a GPU" in record.getMessage()]
    assert len(told) == 1 and told[0].name == "fedjax_het"


def test_cpu_devices_that_were_asked_for_are_meant(monkeypatch, caplog):
    monkeypatch.setattr(hardware, "describe_unused_hardware", lambda: "there is a GPU")
    placement = Placement(devices=jax.devices("cpu")[:1])
    simulate(make_spec(rounds=1), dataset=make_user_dataset(), placement=placement)
    assert "there is a GPU" not in caplog.text


def test_replaced_modules_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(__version__="2.0.2"))
    monkeypatch.setattr(
        hardware, "_get_installed_version", lambda name: "2.4.1" if name == "numpy" else None
    )
    assert find_replaced_modules() == ["numpy 2.0.2 is imported, 2.4.1 installed"]


def test_this_process_has_what_is_installed(monkeypatch):
    monkeypatch.undo()
    assert find_replaced_modules() == []


def test_a_notebook_sees_versions_devices_and_what_is_to_be_done(monkeypatch, capsys):
    show_environment()
    (line,) = capsys.readouterr().out.splitlines()
    assert fedjax_het.__version__ in line and jax.__version__ in line
    assert repr(jax.devices()[0]) in line
    monkeypatch.setattr(hardware, "describe_unused_hardware", lambda: "there is a GPU")
    monkeypatch.setattr(
        hardware, "find_replaced_modules", lambda: ["numpy 1 is imported, 2 installed"]
    )
    fedjax_het.show_environment()
    _, restart, note = capsys.readouterr().out.splitlines()
    assert restart.startswith("Restart the runtime") and "numpy 1" in restart
    assert note == "Note: there is a GPU."
