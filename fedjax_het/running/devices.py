"""What a process runs on, and which flags would help there: for `fedjax-het devices`, and for
notebooks."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_het.common.cache import cache_root
from fedjax_het.common.environment import environment
from fedjax_het.common.hardware import unused_hardware
from fedjax_het.common.variables import (
    JAX_CACHE,
    JAX_CPU_DEVICES,
    MEMORY_SHARE,
    XLA_FLAGS,
    text_of,
)
from fedjax_het.engine.memory import free_ram, own_devices
from fedjax_het.engine.timings import Timing, recall_all
from fedjax_het.nn.computing import used_precision

_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-plugin|libtpu")
WHILE_GRAPHS = 12030  # CUDA's version from which graphs have loops and branches


class Advice(NamedTuple):
    """A setting that helps on a backend.

    setting: as it is written into the environment, before jax is first used. why: it helps.
    is_set: whether it is there already, with whatever value.
    """

    setting: str
    why: str
    is_set: bool


def advice(backend: str, version: int | None = None) -> list[Advice]:
    """The settings that help on "cpu", "gpu" or "tpu", by what the environment has now.

    version: of CUDA, as 12030 for 12.3; None where there is none, or nobody tells.
    """
    if backend not in ("gpu", "cuda"):
        return []
    flags = text_of(XLA_FLAGS)
    cache = cache_root() / "autotune"

    def flag(name: str, value: str, why: str) -> Advice:
        return Advice(f"XLA_FLAGS={name}={value}", why, name in flags)

    found = [
        flag(
            "--xla_gpu_per_fusion_autotune_cache_dir",
            str(cache),
            "keeps which kernels were found fastest, so that the next process compiles sooner",
        ),
        Advice(
            f"{MEMORY_SHARE.name}=0.9",
            "lets jax take nine tenths of the memory instead of three quarters",
            bool(text_of(MEMORY_SHARE)),
        ),
    ]
    if version is None or version >= WHILE_GRAPHS:
        graphs = flag(
            "--xla_gpu_enable_command_buffer",
            "+WHILE,+CONDITIONAL",
            "makes whole chunks of rounds one CUDA graph, loops and all (CUDA 12.3 or newer)",
        )
        found.insert(0, graphs)
    return found


def about_devices(devices: Sequence[jax.Device] | None = None) -> Iterator[str]:
    """Lines for a user: versions, devices and their memory, precision, flags, and what short
    timings found on them before. Starts jax's backend; ConfigError where that cannot be."""
    made_in = environment()
    devices = devices or own_devices(jax.devices())
    first, backend = devices[0], jax.default_backend()
    names = ("fedjax_het", "jax", "jaxlib")
    versions = [f"{name} {made_in[name]}" for name in names]
    yield f"versions: {', '.join([*versions, *plugins()])}, Python {platform.python_version()}"
    yield f"backend: {backend}, {len(devices)} x {first.device_kind}{_driver(first)}"
    if line := unused_hardware():
        yield f"note: {line}"
    yield from _memory(devices)
    asked = None if made_in["matmul_precision"] == "default" else made_in["matmul_precision"]
    said = f"asked for by jax: {asked}" if asked else "the backend's own"
    yield f"precision: {used_precision(None, asked, first.platform)} ({said})"
    yield from _settings(backend, _cuda_version(first))
    yield from _timings(first.device_kind)


def plugins() -> list[str]:
    """The installed packages that bring jax other devices than CPUs, with their versions."""
    found = importlib.metadata.distributions()
    named = {(each.name or "").lower().replace("_", "-"): each.version for each in found}
    return [f"{name} {named[name]}" for name in sorted(named) if _PLUGIN.fullmatch(name)]


def _memory(devices: Sequence[jax.Device]) -> Iterator[str]:
    if devices[0].platform == "cpu":
        free = free_ram()
        said = "unknown" if free is None else f"{free / 1e9:.1f} GB free"
        yield f"memory: {said}, of the machine that they share"
        return
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            yield f"memory of device {device.id}: unknown"
            continue
        limit = stats["bytes_limit"]
        free = limit - stats.get("bytes_in_use", 0)
        yield f"memory of device {device.id}: {free / 1e9:.1f} of {limit / 1e9:.1f} GB free"


def _settings(backend: str, version: int | None) -> Iterator[str]:
    known = (XLA_FLAGS, JAX_CPU_DEVICES, JAX_CACHE, MEMORY_SHARE)
    there = [f"{each.name}={text_of(each)}" for each in known if text_of(each)]
    yield f"set: {', '.join(there) or 'no flags'}"
    # jax adds its settings to `jax.config` at run time: its types do not name them.
    settings: Any = jax.config
    yield f"compiled programs are kept in {settings.jax_compilation_cache_dir or 'no folder'}"
    if backend == "cpu" and not text_of(JAX_CPU_DEVICES) and "device" not in text_of(XLA_FLAGS):
        yield "set by fedjax_het: a device for each core"
    missing = [each for each in advice(backend, version) if not each.is_set]
    if not missing:
        yield "would help: nothing that is known of"
    for each in missing:
        yield f"would help: {each.setting}"
        yield f"    {each.why}"


def _timings(device_kind: str) -> Iterator[str]:
    known = recall_all(device_kind)
    if not known:
        yield "timings of lanes: none yet"
        return
    yield "timings, in ms a step (by lanes, and what computes convolutions):"
    for work, ways in sorted(known.items()):
        yield f"  {work.partition('|')[2].replace('|', ', ')}"
        yield f"    {', '.join(f'{way}: {_in_ms(timing)}' for way, timing in ways.items())}"


def _in_ms(timing: Timing) -> str:
    return "too large, or failed" if timing.seconds is None else f"{1000 * timing.seconds:.3g}"


def _driver(device: jax.Device) -> str:
    version = _cuda_version(device)
    return "" if version is None else f", CUDA {version // 1000}.{version % 1000 // 10}"


def _cuda_version(device: jax.Device) -> int | None:
    found = re.search(r"cuda (\d+)", getattr(device.client, "platform_version", ""))
    return int(found[1]) if found else None
