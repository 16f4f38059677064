"""Hardware that is there and not used: a GPU or a TPU, where jax runs on the CPU."""

import functools
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fedjax_het.utils.env import get_environ

log = logging.getLogger("fedjax_het")

MIN_CUDA13_DRIVER = 580  # the oldest that runs CUDA 13
_GOOGLE_PCI_VENDOR = "0x1ae0"  # of a TPU among PCI devices
_TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "COLAB_TPU_ADDR")
# What a notebook may have imported before something was installed over it.
_NOTEBOOK_MODULES = ("numpy", "jax", "jaxlib", "flax", "optax", "scipy", "pandas", "matplotlib")


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
    import jax

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
    import jax

    from fedjax_het._version import __version__

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
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
