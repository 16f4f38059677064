"""fedjax_het: federated learning on heterogeneous clients, a federation as one compiled program."""

import importlib
from typing import Any

from fedjax_het.common.variables import import_jax

import_jax()

from fedjax_het._startup import request_one_cpu_device_per_core  # noqa: E402
from fedjax_het.common.cache import enable_compilation_cache  # noqa: E402

request_one_cpu_device_per_core()
enable_compilation_cache()

__version__ = "0.6.0"

# Imported when first used, so that `import fedjax_het` stays fast.
_PUBLIC = {
    "RunSpec": "fedjax_het.settings.spec",
    "Result": "fedjax_het.running.result",
    "simulate": "fedjax_het.running.simulation",
    "federation": "fedjax_het.running.simulation",
    "sweep": "fedjax_het.running.sweeps",
    "Placement": "fedjax_het.running.placement",
    "grid": "fedjax_het.settings.grids",
    "load_results": "fedjax_het.running.store",
    "load_curves": "fedjax_het.running.store",
    "load_model": "fedjax_het.running.trained",
    "evaluate": "fedjax_het.running.trained",
    "ConfigError": "fedjax_het.common.errors",
    "load_dataset": "fedjax_het.data",
    "dataset_from_arrays": "fedjax_het.data",
    "load_image_folder": "fedjax_het.data",
    "make_partition": "fedjax_het.data",
    "make_model": "fedjax_het.nn",
    "register_method": "fedjax_het.algorithms",
    "register_network": "fedjax_het.nn",
    "register_optimizer": "fedjax_het.engine.optimizers",
    "register_dataset": "fedjax_het.data",
    "register_partition": "fedjax_het.data",
    "register_server_source": "fedjax_het.data",
    "register_measure": "fedjax_het.engine.measured",
    "register_tracker": "fedjax_het.running.trackers",
    "show_environment": "fedjax_het.common.hardware",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
