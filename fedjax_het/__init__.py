"""Federated learning on heterogeneous clients: each federation is one compiled program."""

import importlib
import warnings
from typing import Any

from fedjax_het.utils.env import import_jax

import_jax()

from fedjax_het import _startup  # noqa: E402
from fedjax_het._version import __version__  # noqa: E402

_startup.request_one_cpu_device_per_core()
_startup.enable_compilation_cache()

# Imported when first used, so that `import fedjax_het` stays fast.
_NAMES_BY_MODULE = {
    "algorithms": ("register_method",),
    "config.grid": ("grid",),
    "config.run_spec": ("RunSpec",),
    "core.optimizers": ("register_optimizer",),
    "data": (
        *("load_dataset", "dataset_from_arrays", "load_image_folder", "make_partition"),
        *("register_dataset", "register_partition", "register_server_source"),
    ),
    "metrics.declarations": ("MetricInfo",),
    "metrics.registry": ("register_metric",),
    "nn": ("make_model", "register_network"),
    "runtime.device_report": ("show_environment",),
    "runtime.placement": ("Placement",),
    "runtime.result_store": ("load_curves", "load_results"),
    "runtime.results": ("Result",),
    "runtime.session": ("federation", "simulate"),
    "runtime.sweep": ("sweep",),
    "runtime.trackers": ("register_tracker",),
    "runtime.trained_model": ("evaluate", "load_model"),
    "utils.errors": ("ConfigError",),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
__all__ = ["__version__", *_MODULES]
_FORMER_NAMES = {"register_measure": "register_metric"}


def __getattr__(name: str) -> Any:
    if name in _FORMER_NAMES:
        message = f"fedjax_het: {name} is deprecated, use {_FORMER_NAMES[name]}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return __getattr__(_FORMER_NAMES[name])
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fedjax_het.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
