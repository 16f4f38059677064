"""What a process runs on, and which flags would help there: for `fedjax-het devices`, and for
notebooks."""

import functools
import importlib.metadata
import logging
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_het._version import __version__
from fedjax_het.core.autotune.cache import load_all_timings
from fedjax_het.core.memory import free_host_bytes, local_devices
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.utils.env import (
    JAX_COMPILATION_CACHE_DIR,
    JAX_CPU_DEVICES,
    MEMORY_FRACTION,
    XLA_FLAGS,
    get_cache_dir,
    get_environ,
    get_text,
)

log = logging.getLogger("fedjax_het")

_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-plugin|libtpu")
MIN_CUDA_FOR_GRAPH_LOOPS = 12030  # CUDA's version from which graphs have loops and branches
MIN_CUDA13_DRIVER = 580  # the oldest that runs CUDA 13
_GOOGLE_PCI_VENDOR = "0x1ae0"  # of a TPU among PCI devices
_TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "COLAB_TPU_ADDR")
# What a notebook may have imported before something was installed over it.
_NOTEBOOK_MODULES = ("numpy", "jax", "jaxlib", "flax", "optax", "scipy", "pandas", "matplotlib")


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
    # It imports flax, which fails where a notebook replaced jax: `show_environment` must not.
    from fedjax_het.nn.precision import describe_precision

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
        texts = (
            f"{name}: "
            + ("too large, or failed" if timing.seconds is None else f"{1000 * timing.seconds:.3g}")
            for name, timing in candidates.items()
        )
        yield f"    {', '.join(texts)}"


def _describe_driver(device: jax.Device) -> str:
    version = _get_cuda_version(device)
    return "" if version is None else f", CUDA {version // 1000}.{version % 1000 // 10}"


def _get_cuda_version(device: jax.Device) -> int | None:
    match = re.search(r"cuda (\d+)", getattr(device.client, "platform_version", ""))
    return int(match[1]) if match else None


@functools.cache
def warn_unused_hardware() -> None:
    """Say once, in one line, that there is a GPU or a TPU and jax does not use it. Starts jax's
    backend."""
    line = describe_unused_hardware()
    if line is not None:
        log.warning("note: %s", line)


def describe_unused_hardware(
    root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> str | None:
    """One line that names the hardware and the command that mends it; None where jax uses an
    accelerator, where there is none, or where the CPU is what was asked for.

    root: of the file system that is looked at. environment: default, this process's. Starts jax's
    backend.
    """
    environment = get_environ() if environment is None else environment

    jax_config: Any = jax.config  # jax adds its settings at run time: its types do not name them
    requested_platform = (jax_config.jax_platforms or environment.get("JAX_PLATFORMS") or "").split(
        ","
    )[0]
    if requested_platform == "cpu" or jax.default_backend() != "cpu":
        return None
    if _has_tpu(root, environment):
        return _format_install_hint("a TPU", "tpu", jax.__version__)
    if _has_gpu(root, environment):
        return _format_install_hint(
            "an NVIDIA GPU", f"cuda{_find_cuda_version(root)}", jax.__version__
        )
    return None


def _format_install_hint(device_name: str, extra: str, version: str) -> str:
    return (
        f"this machine has {device_name}, but jax runs on the CPU: "
        f'`pip install "jax[{extra}]=={version}"`, then restart Python (a notebook: its runtime)'
    )


def _has_gpu(root: Path, environment: Mapping[str, str]) -> bool:
    """A device or a driver of NVIDIA's that is not hidden."""
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return False
    has_device_file = any(
        re.fullmatch(r"nvidia\d+", path.name) for path in _list_folder(root / "dev")
    )
    has_driver = (root / "proc/driver/nvidia/version").exists()
    has_wsl_driver = (root / "dev/dxg").exists() and (
        root / "usr/lib/wsl/lib/libcuda.so.1"
    ).exists()
    return has_device_file or has_driver or has_wsl_driver


def _has_tpu(root: Path, environment: Mapping[str, str]) -> bool:
    if any(re.fullmatch(r"accel\d+", path.name) for path in _list_folder(root / "dev")):
        return True
    if any(environment.get(name) for name in _TPU_VARIABLES):
        return True
    has_vfio_group = any(path.name.isdigit() for path in _list_folder(root / "dev/vfio"))
    vendors = (_read_text(path / "vendor") for path in _list_folder(root / "sys/bus/pci/devices"))
    return has_vfio_group and any(vendor.strip() == _GOOGLE_PCI_VENDOR for vendor in vendors)


def _find_cuda_version(root: Path) -> int:
    """The CUDA whose plugin is installed, else the newest that the driver runs."""
    for major in (12, 13):
        if _get_installed_version(f"jax-cuda{major}-plugin"):
            return major
    driver = re.search(
        r"Kernel Module.*?\s(\d+)\.\d", _read_text(root / "proc/driver/nvidia/version")
    )
    return 13 if driver is not None and int(driver[1]) >= MIN_CUDA13_DRIVER else 12


def find_replaced_modules(names: Iterable[str] = _NOTEBOOK_MODULES) -> list[str]:
    """Modules that were imported before others of other versions were installed over them, as
    `numpy 2.0.2 is imported, 2.4.1 installed`."""
    descriptions = []
    for name in names:
        imported_version = getattr(sys.modules.get(name), "__version__", None)
        installed_version = None if imported_version is None else _get_installed_version(name)
        if installed_version is not None and installed_version != imported_version:
            descriptions.append(
                f"{name} {imported_version} is imported, {installed_version} installed"
            )
    return descriptions


def show_environment() -> None:
    """Print versions and devices; and what is to be done, if anything: a restart, where modules
    that are imported were replaced, or an installation, where hardware is not used."""
    print(f"fedjax_het {__version__}, jax {jax.__version__}, {jax.devices()}")
    if module_notes := find_replaced_modules():
        print(f"Restart the runtime, then run this cell again: {'; '.join(module_notes)}.")
    if hint := describe_unused_hardware():
        print(f"Note: {hint}.")


def _list_folder(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _get_installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
