"""Described devices that programs are compiled for."""

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
    """A device that programs are compiled for.

    Attributes:
      platform: jax's name of the platform.
      chips: number of devices in the description.
    """

    platform: str
    chips: int


TARGETS = {
    "h200": Target("gpu", 1),
    "h200x2": Target("gpu", 2),
    "v5e": Target("tpu", 4),
    "cpu": Target("cpu", 1),
}


def prepare_process(target: str, devices: int) -> None:
    """Configure the process before jax initializes its devices.

    Args:
      target: a name in `TARGETS`.
      devices: number of CPU devices, on which the inputs of the programs are made.
    """
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
    """Return the described devices of a target; on a CPU the devices of this machine.

    The CUDA plugin (jax[cuda12]) or libtpu must be installed. No GPU or TPU is needed.
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
    """Make jax and execution plans report a platform inside the context."""
    platform_property = mock.PropertyMock(return_value=platform)
    backend = mock.patch.object(jax, "default_backend", lambda: platform)
    with backend, mock.patch.object(ExecutionPlan, "platform", platform_property):
        yield
