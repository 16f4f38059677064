"""What a process runs on, and which flags would help there: for `fedjax-het devices`, and for
notebooks."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_het.core.autotune.cache import Timing, load_all_timings
from fedjax_het.core.memory import free_host_bytes, local_devices
from fedjax_het.nn.precision import describe_precision
from fedjax_het.runtime.hardware import describe_unused_hardware
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.utils.cache import get_cache_dir
from fedjax_het.utils.env import (
    JAX_COMPILATION_CACHE_DIR,
    JAX_CPU_DEVICES,
    MEMORY_FRACTION,
    XLA_FLAGS,
    get_text,
)

_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-plugin|libtpu")
MIN_CUDA_FOR_GRAPH_LOOPS = 12030  # CUDA's version from which graphs have loops and branches


class Recommendation(NamedTuple):
    """A setting that helps on a backend.

    setting: as it is written into the environment, before jax is first used. why: it helps.
    is_set: whether it is there already, with whatever value.
    """

    setting: str
    reason: str
    is_set: bool


def recommend_settings(backend: str, version: int | None = None) -> list[Recommendation]:
    """The settings that help on "cpu", "gpu" or "tpu", by what the environment has now.

    version: of CUDA, as 12030 for 12.3; None where there is none, or nobody tells.
    """
    if backend not in ("gpu", "cuda"):
        return []
    flags = get_text(XLA_FLAGS)
    cache = get_cache_dir() / "autotune"

    def recommend_flag(name: str, value: str, reason: str) -> Recommendation:
        return Recommendation(f"XLA_FLAGS={name}={value}", reason, name in flags)

    recommendations = [
        recommend_flag(
            "--xla_gpu_per_fusion_autotune_cache_dir",
            str(cache),
            "keeps which kernels were found fastest, so that the next process compiles sooner",
        ),
        Recommendation(
            f"{MEMORY_FRACTION.name}=0.9",
            "lets jax take nine tenths of the memory instead of three quarters",
            bool(get_text(MEMORY_FRACTION)),
        ),
    ]
    if version is None or version >= MIN_CUDA_FOR_GRAPH_LOOPS:
        graphs = recommend_flag(
            "--xla_gpu_enable_command_buffer",
            "+WHILE,+CONDITIONAL",
            "makes whole chunks of rounds one CUDA graph, loops and all (CUDA 12.3 or newer)",
        )
        recommendations.insert(0, graphs)
    return recommendations


def describe_devices(devices: Sequence[jax.Device] | None = None) -> Iterator[str]:
    """Lines for a user: versions, devices and their memory, precision, flags, and what short
    timings found on them before. Starts jax's backend; ConfigError where that cannot be."""
    current_environment = describe_environment()
    devices = devices or local_devices(jax.devices())
    first, backend = devices[0], jax.default_backend()
    names = ("fedjax_het", "jax", "jaxlib")
    versions = [f"{name} {current_environment[name]}" for name in names]
    yield f"versions: {', '.join([*versions, *list_plugins()])}, Python {platform.python_version()}"
    yield f"backend: {backend}, {len(devices)} x {first.device_kind}{_describe_driver(first)}"
    if line := describe_unused_hardware():
        yield f"note: {line}"
    yield from _describe_memory(devices)
    requested = (
        None
        if current_environment["matmul_precision"] == "default"
        else current_environment["matmul_precision"]
    )
    origin = f"asked for by jax: {requested}" if requested else "the backend's own"
    yield f"precision: {describe_precision(None, requested, first.platform)} ({origin})"
    yield from _describe_settings(backend, _get_cuda_version(first))
    yield from _describe_timings(first.device_kind)


def list_plugins() -> list[str]:
    """The installed packages that bring jax other devices than CPUs, with their versions."""
    distributions = importlib.metadata.distributions()
    versions = {
        (distribution.name or "").lower().replace("_", "-"): distribution.version
        for distribution in distributions
    }
    return [f"{name} {versions[name]}" for name in sorted(versions) if _PLUGIN.fullmatch(name)]


def _describe_memory(devices: Sequence[jax.Device]) -> Iterator[str]:
    if devices[0].platform == "cpu":
        free_bytes = free_host_bytes()
        free_text = "unknown" if free_bytes is None else f"{free_bytes / 1e9:.1f} GB free"
        yield f"memory: {free_text}, of the machine that they share"
        return
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            yield f"memory of device {device.id}: unknown"
            continue
        limit = stats["bytes_limit"]
        free_bytes = limit - stats.get("bytes_in_use", 0)
        yield f"memory of device {device.id}: {free_bytes / 1e9:.1f} of {limit / 1e9:.1f} GB free"


def _describe_settings(backend: str, version: int | None) -> Iterator[str]:
    variables = (XLA_FLAGS, JAX_CPU_DEVICES, JAX_COMPILATION_CACHE_DIR, MEMORY_FRACTION)
    assignments = [
        f"{variable.name}={get_text(variable)}" for variable in variables if get_text(variable)
    ]
    yield f"set: {', '.join(assignments) or 'no flags'}"
    # jax adds its settings to `jax.config` at run time: its types do not name them.
    settings: Any = jax.config
    yield f"compiled programs are kept in {settings.jax_compilation_cache_dir or 'no folder'}"
    if backend == "cpu" and not get_text(JAX_CPU_DEVICES) and "device" not in get_text(XLA_FLAGS):
        yield "set by fedjax_het: a device for each core"
    recommendations = [
        variable for variable in recommend_settings(backend, version) if not variable.is_set
    ]
    if not recommendations:
        yield "would help: nothing that is known of"
    for recommendation in recommendations:
        yield f"would help: {recommendation.setting}"
        yield f"    {recommendation.reason}"


def _describe_timings(device_kind: str) -> Iterator[str]:
    timings = load_all_timings(device_kind)
    if not timings:
        yield "timings of lanes: none yet"
        return
    yield "timings, in ms a step (by lanes, and what computes convolutions):"
    for workload, candidates in sorted(timings.items()):
        yield f"  {workload.partition('|')[2].replace('|', ', ')}"
        yield f"    {', '.join(f'{candidate}: {_format_milliseconds(timing)}' for candidate, timing in candidates.items())}"


def _format_milliseconds(timing: Timing) -> str:
    return "too large, or failed" if timing.seconds is None else f"{1000 * timing.seconds:.3g}"


def _describe_driver(device: jax.Device) -> str:
    version = _get_cuda_version(device)
    return "" if version is None else f", CUDA {version // 1000}.{version % 1000 // 10}"


def _get_cuda_version(device: jax.Device) -> int | None:
    match = re.search(r"cuda (\d+)", getattr(device.client, "platform_version", ""))
    return int(match[1]) if match else None
