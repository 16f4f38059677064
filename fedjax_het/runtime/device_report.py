"""Version and devices of a process, the settings that help, and hardware that jax does not use.

`fedjax-het devices` prints `describe_devices`, notebooks call `show_environment`.
"""

import ast
import functools
import importlib.metadata
import logging
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from fedjax_het._version import __version__
from fedjax_het.core.memory import free_host_bytes, local_devices
from fedjax_het.utils.arrays import PRNG_IMPL
from fedjax_het.utils.env import (
    JAX_COMPILATION_CACHE_DIR,
    JAX_CPU_DEVICES,
    MEMORY_FRACTION,
    XLA_FLAGS,
    get_cache_dir,
    get_environ,
    get_text,
    require_devices,
)

log = logging.getLogger("fedjax_het")

_GRAPH_LOOPS_FLAG = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
MIN_CUDA_FOR_GRAPH_LOOPS = 12030  # CUDA 12.3: from it on graphs have loops and branches
MIN_CUDA13_DRIVER = 580  # the oldest driver that runs CUDA 13
# Switches of JAX with their defaults. The first change what is drawn, the others how is rounded.
# The generator itself is `PRNG_IMPL`, whatever `jax_default_prng_impl` is.
_DRAW_SWITCHES = {
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
}
_ROUNDING_SWITCHES = {
    "jax_allow_f16_reductions": True,
    "jax_cpu_enable_fast_math": False,
    "jax_disable_jit": False,
    "jax_disable_most_optimizations": False,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_optimization_level": "UNKNOWN",
    "jax_softmax_custom_jvp": False,
    "jax_use_direct_linearize": True,
}
# Flags of XLA that divide the processor, or write and read files of the compiler.
_FLAG_WITHOUT_EFFECT = re.compile("device_count|cache_dir|dump|command_buffer|log_level")
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-plugin|libtpu")
# Label of `Planner`: network, options, shape of the inputs, number of classes, precision.
_NETWORK_LABEL = re.compile(r"(\S+) (\(.*\)) \(([^()]+)\) (\d+) (.+)")
_GOOGLE_PCI_VENDOR = "0x1ae0"  # of a TPU among PCI devices
_TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "COLAB_TPU_ADDR")
# Modules that a notebook may have imported before another version of them was installed.
_NOTEBOOK_MODULES = ("numpy", "jax", "jaxlib", "flax", "optax", "scipy", "pandas", "matplotlib")


def describe_environment() -> dict[str, Any]:
    """Return everything outside the settings that decides a run's numbers, as results store it.

    `runtime.identity` lists which of the values are part of a result's name. Starts the backend of
    jax.

    Returns:
      Versions, device, precision, generator of random numbers, and the other switches of JAX and
      XLA that are not at their defaults.

    Raises:
      ConfigError: if the backend cannot start.
    """
    require_devices()
    config: Any = jax.config  # jax adds its settings at run time, so its types do not name them
    precision, x64 = config.jax_default_matmul_precision, config.jax_enable_x64
    return {
        "fedjax_het": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "device": jax.devices()[0].device_kind,
        "matmul_precision": str(precision or "default"),
        "x64": bool(x64),
        "prng": " ".join([PRNG_IMPL, *_list_changed(_DRAW_SWITCHES)]),
        "switches": " ".join(_list_changed(_ROUNDING_SWITCHES) + _list_compiler_flags())
        or "default",
        **_get_library_versions(),
    }


@functools.cache
def _get_library_versions() -> dict[str, str]:
    """Return versions, read once: an imported library does not change."""
    return {name: _get_installed_version(name) or "none" for name in ("numpy", "flax", "optax")}


def _list_changed(defaults: Mapping[str, Any]) -> list[str]:
    values = {name: getattr(jax.config, name, default) for name, default in defaults.items()}
    return [f"{name}={value}" for name, value in values.items() if value != defaults[name]]


def _list_compiler_flags() -> list[str]:
    """Return the flags of XLA, and a variable of CUDA, that may change how sums are rounded."""
    flags = [f for f in get_text(XLA_FLAGS).split() if not _FLAG_WITHOUT_EFFECT.search(f)]
    tf32 = get_environ().get("NVIDIA_TF32_OVERRIDE")
    return [*flags, *([f"NVIDIA_TF32_OVERRIDE={tf32}"] if tf32 else [])]


def recommend_settings(backend: str, cuda_version: int | None = None) -> dict[str, str]:
    """Return the settings that help on a backend and are not set.

    Args:
      backend: "cpu", "gpu" or "tpu".
      cuda_version: version of CUDA, 12030 for 12.3; None if unknown.

    Returns:
      The effect of each setting, by the assignment to an environment variable that has to be made
      before jax is first used.

    Example:
      >>> from fedjax_het.runtime.device_report import recommend_settings
      >>> recommend_settings("cpu")
      {}
    """
    if backend not in ("gpu", "cuda"):
        return {}
    xla_flags = {
        _GRAPH_LOOPS_FLAG: (
            "makes whole chunks of rounds one CUDA graph, loops and all (CUDA 12.3 or newer)"
        ),
        f"--xla_gpu_per_fusion_autotune_cache_dir={get_cache_dir() / 'autotune'}": (
            "stores which kernels were fastest, so that the next process compiles sooner"
        ),
    }
    if cuda_version is not None and cuda_version < MIN_CUDA_FOR_GRAPH_LOOPS:
        del xla_flags[_GRAPH_LOOPS_FLAG]
    settings = {
        f"XLA_FLAGS={flag}": effect
        for flag, effect in xla_flags.items()
        if flag.partition("=")[0] not in get_text(XLA_FLAGS)
    }
    if not get_text(MEMORY_FRACTION):
        effect = "lets jax use nine tenths of the memory instead of three quarters"
        settings[f"{MEMORY_FRACTION.name}=0.9"] = effect
    return settings


def describe_devices(devices: Sequence[jax.Device] | None = None) -> Iterator[str]:
    """Yield lines for a user: versions, devices, their memory, precision, flags and timings.

    Starts jax's backend.

    Args:
      devices: the devices (default: all of this process).

    Yields:
      A line of the report.

    Raises:
      ConfigError: if jax cannot start its backend.
    """
    # Flax, which both import, fails where a notebook replaced jax: `show_environment` must not.
    from fedjax_het.core.autotune import load_timings
    from fedjax_het.nn.precision import describe_precision

    environment = describe_environment()
    devices = devices or local_devices(jax.devices())
    first, backend = devices[0], jax.default_backend()
    match = re.search(r"cuda (\d+)", getattr(first.client, "platform_version", ""))
    cuda_version = int(match[1]) if match else None
    versions = [f"{name} {environment[name]}" for name in ("fedjax_het", "jax", "jaxlib")]
    yield f"versions: {', '.join([*versions, *list_plugins()])}, Python {platform.python_version()}"
    cuda = f", CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}" if cuda_version else ""
    yield f"backend: {backend}, {len(devices)} x {first.device_kind}{cuda}"
    if line := describe_unused_hardware():
        yield f"note: {line}"
    yield from _describe_memory(devices)
    requested = environment["matmul_precision"]
    requested = None if requested == "default" else requested
    origin = f"set in jax: {requested}" if requested else "the backend's own"
    yield f"precision: {describe_precision(None, requested, first.platform)} ({origin})"
    yield from _describe_settings(backend, cuda_version)
    yield from _describe_timings(load_timings(first.device_kind))


def list_plugins() -> list[str]:
    """Return the installed packages through which jax uses accelerators, with their versions."""
    distributions = importlib.metadata.distributions()
    versions = {(d.name or "").lower().replace("_", "-"): d.version for d in distributions}
    return [f"{name} {versions[name]}" for name in sorted(versions) if _PLUGIN.fullmatch(name)]


def _describe_memory(devices: Sequence[jax.Device]) -> Iterator[str]:
    if devices[0].platform == "cpu":
        free = free_host_bytes()
        text = "unknown" if free is None else f"{free / 1e9:.1f} GB free"
        yield f"memory: {text}, shared by the devices"
        return
    for device in devices:
        stats = device.memory_stats() or {}
        text = "unknown"
        if (limit := stats.get("bytes_limit")) is not None:
            free = limit - stats.get("bytes_in_use", 0)
            text = f"{free / 1e9:.1f} of {limit / 1e9:.1f} GB free"
        yield f"memory of device {device.id}: {text}"


def _describe_settings(backend: str, cuda_version: int | None) -> Iterator[str]:
    variables = (XLA_FLAGS, JAX_CPU_DEVICES, JAX_COMPILATION_CACHE_DIR, MEMORY_FRACTION)
    assignments = [
        f"{variable.name}={get_text(variable)}" for variable in variables if get_text(variable)
    ]
    yield f"set: {', '.join(assignments) or 'no flags'}"
    # jax adds its settings to `jax.config` at run time: its types do not name them.
    settings: Any = jax.config
    yield f"compiled programs are stored in {settings.jax_compilation_cache_dir or 'no folder'}"
    if backend == "cpu" and not get_text(JAX_CPU_DEVICES) and "device" not in get_text(XLA_FLAGS):
        yield "set by fedjax_het: a device for each core"
    settings_to_make = recommend_settings(backend, cuda_version)
    if not settings_to_make:
        yield "recommended: no further setting"
    for setting, effect in settings_to_make.items():
        yield f"recommended: {setting}"
        yield f"    {effect}"


def _describe_timings(timings: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if not timings:
        yield "timings of lanes: none yet"
        return
    yield "timings in ms per step, by number of lanes and implementation of convolutions:"
    for workload, candidates in sorted(timings.items()):
        yield f"  {_describe_workload(workload)}"
        seconds = {name: timing.seconds for name, timing in candidates.items()}
        texts = {
            name: "too large, or failed" if value is None else f"{1000 * value:.3g}"
            for name, value in seconds.items()
        }
        yield "    " + ", ".join(f"{name}: {text}" for name, text in texts.items())


def _describe_workload(workload: str) -> str:
    """Return the row of a workload in the table of timings in words."""
    _, label, *work = workload.split("|")
    if match := _NETWORK_LABEL.fullmatch(label):
        name, options, shape, num_classes, precision = match.groups()
        options = "".join(f" {option}={value}" for option, value in ast.literal_eval(options))
        *sizes, last = [part.strip("' ") for part in shape.split(",") if part.strip()]
        sizes, tokens = (sizes, f" of {last}") if "tokens" in last else ([*sizes, last], "")
        inputs = f"inputs {'x'.join(sizes)}{tokens}"
        label = f"{name}{options}, {inputs}, {num_classes} outputs, precision {precision}"
    return ", ".join([label, *work])


@functools.cache
def warn_unused_hardware() -> None:
    """Log a warning once if there is a GPU or a TPU that jax does not use. Starts jax's backend."""
    line = describe_unused_hardware()
    if line is not None:
        log.warning("note: %s", line)


def describe_unused_hardware(
    root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> str | None:
    """Name an accelerator that jax does not use, and the command that installs its plugin.

    Starts jax's backend.

    Args:
      root: root of the file system.
      environment: environment variables (default: of this process).

    Returns:
      One line; None if jax uses an accelerator, if there is none, or if the user chose the CPU.
    """
    environment = get_environ() if environment is None else environment
    jax_config: Any = jax.config  # jax adds its settings at run time: its types do not name them
    platforms = jax_config.jax_platforms or environment.get("JAX_PLATFORMS") or ""
    if platforms.split(",")[0] == "cpu" or jax.default_backend() != "cpu":
        return None
    if _has_tpu(root, environment):
        name, extra = "a TPU", "tpu"
    elif _has_gpu(root, environment):
        name, extra = "an NVIDIA GPU", f"cuda{_find_cuda_major_version(root)}"
    else:
        return None
    return (
        f"this machine has {name}, but jax runs on the CPU: `pip install "
        f'"jax[{extra}]=={jax.__version__}"`, then restart Python (a notebook: its runtime)'
    )


def _has_gpu(root: Path, environment: Mapping[str, str]) -> bool:
    """Return whether there is a device or a driver of NVIDIA that is not hidden."""
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return False
    has_wsl_driver = (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return (
        _has_file(root / "dev", r"nvidia\d+")
        or (root / "proc/driver/nvidia/version").exists()
        or ((root / "dev/dxg").exists() and has_wsl_driver)
    )


def _has_tpu(root: Path, environment: Mapping[str, str]) -> bool:
    if _has_file(root / "dev", r"accel\d+") or any(map(environment.get, _TPU_VARIABLES)):
        return True
    paths = (root / "sys/bus/pci/devices").glob("*/vendor")
    vendors = [_read_text(path).strip() for path in paths]
    return _has_file(root / "dev/vfio", r"\d+") and _GOOGLE_PCI_VENDOR in vendors


def _has_file(folder: Path, pattern: str) -> bool:
    """Return whether a folder has a file whose name fits; False for an unreadable folder."""
    try:
        return any(re.fullmatch(pattern, path.name) for path in folder.iterdir())
    except OSError:
        return False


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _find_cuda_major_version(root: Path) -> int:
    """Return the CUDA whose plugin is installed, else the newest that the driver runs."""
    for major in (12, 13):
        if _get_installed_version(f"jax-cuda{major}-plugin"):
            return major
    version = _read_text(root / "proc/driver/nvidia/version")
    driver = re.search(r"Kernel Module.*?\s(\d+)\.\d", version)
    return 13 if driver is not None and int(driver[1]) >= MIN_CUDA13_DRIVER else 12


def _get_installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_replaced_modules() -> list[str]:
    """Return the imported modules of which another version was installed since.

    Each is described as in `numpy 2.0.2 is imported, 2.4.1 installed`.
    """
    descriptions = []
    for name in _NOTEBOOK_MODULES:
        imported = getattr(sys.modules.get(name), "__version__", None)
        installed = None if imported is None else _get_installed_version(name)
        if installed is not None and installed != imported:
            descriptions.append(f"{name} {imported} is imported, {installed} installed")
    return descriptions


def show_environment() -> None:
    """Print versions and devices, and whether a restart or an installation is needed.

    A restart is needed if imported modules were replaced, an installation if jax does not use an
    accelerator.

    Example:
      >>> from fedjax_het import show_environment
      >>> show_environment()
      fedjax_het ..., jax ..., [...]
    """
    print(f"fedjax_het {__version__}, jax {jax.__version__}, {jax.devices()}")
    if module_notes := find_replaced_modules():
        print(f"Restart the runtime, then run this cell again: {'; '.join(module_notes)}.")
    if hint := describe_unused_hardware():
        print(f"Note: {hint}.")
