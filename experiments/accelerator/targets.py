"""Devices that are described, not there: what programs are compiled for."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax

from fedjax_het.core.execution_plan import ExecutionPlan

H200 = Path(__file__).parent / "h200.txtpb"


class Target(NamedTuple):
    """Where a program would run. chips: how many the description has to have."""

    platform: str
    chips: int


TARGETS = {
    "h200": Target("gpu", 1),
    "h200x2": Target("gpu", 2),
    "v5e": Target("tpu", 4),
    "cpu": Target("cpu", 1),
}


def prepare_process(target: str, devices: int) -> None:
    """Settings of the process, before anything asks jax for devices: the programs' inputs are
    made on as many CPU devices as the target has."""
    if target == "cpu":
        return
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    if TARGETS[target].platform == "tpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)


def describe_devices(target: str) -> Sequence[jax.Device]:
    """The target's devices; on a CPU those that there are.

    The CUDA plugin (jax[cuda12]) or libtpu has to be installed; no GPU or TPU has to be there.
    """
    from jax.experimental import topologies

    platform, chips = TARGETS[target]
    if platform == "cpu":
        return jax.devices()
    if platform == "tpu":
        return topologies.get_topology_desc("v5e:2x2", "tpu").devices
    return topologies.get_topology_desc(
        platform="cuda", target_config=H200.read_text(), topology=f"1x1x{chips}"
    ).devices


@contextlib.contextmanager
def mock_platform(platform: str) -> Iterator[None]:
    """What asks jax which backend it has, or a plan what its devices are, is told this one."""
    platform_property = mock.PropertyMock(return_value=platform)
    backend = mock.patch.object(jax, "default_backend", lambda: platform)
    with backend, mock.patch.object(ExecutionPlan, "platform", platform_property):
        yield
