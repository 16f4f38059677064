"""fedjax_het: federated learning on heterogeneous clients, a federation as one compiled program."""

import importlib
from typing import Any

from fedjax_het.utils.env import import_jax

import_jax()

from fedjax_het import _startup  # noqa: E402
from fedjax_het._version import __version__  # noqa: E402

_startup.request_one_cpu_device_per_core()
_startup.enable_compilation_cache()

# Imported when first used, so that `import fedjax_het` stays fast.
_PUBLIC = {
    "RunSpec": "fedjax_het.config.run_spec",
    "Result": "fedjax_het.runtime.results",
    "simulate": "fedjax_het.runtime.session",
    "federation": "fedjax_het.runtime.session",
    "sweep": "fedjax_het.runtime.sweep",
    "Placement": "fedjax_het.runtime.placement",
    "grid": "fedjax_het.config.grid",
    "load_results": "fedjax_het.runtime.result_store",
    "load_curves": "fedjax_het.runtime.result_store",
    "load_model": "fedjax_het.runtime.trained_model",
    "evaluate": "fedjax_het.runtime.trained_model",
    "ConfigError": "fedjax_het.utils.errors",
    "load_dataset": "fedjax_het.data",
    "dataset_from_arrays": "fedjax_het.data",
    "load_image_folder": "fedjax_het.data",
    "make_partition": "fedjax_het.data",
    "make_model": "fedjax_het.nn",
    "register_method": "fedjax_het.algorithms",
    "register_network": "fedjax_het.nn",
    "register_optimizer": "fedjax_het.core.optimizers",
    "register_dataset": "fedjax_het.data",
    "register_partition": "fedjax_het.data",
    "register_server_source": "fedjax_het.data",
    "register_measure": "fedjax_het.metrics.registry",
    "register_tracker": "fedjax_het.runtime.trackers",
    "show_environment": "fedjax_het.runtime.device_report",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
