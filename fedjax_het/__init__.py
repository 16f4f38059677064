"""Federated learning on heterogeneous clients: each federation is one compiled program."""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from fedjax_het import _startup
from fedjax_het._version import __version__

_startup.configure_jax_when_imported()

# The two lists are equal: the first is for type checkers and editors, the second for imports.
if TYPE_CHECKING:
    from fedjax_het.aggregation import register_aggregation as register_aggregation
    from fedjax_het.algorithms import register_method as register_method
    from fedjax_het.analysis.inspection import describe as describe
    from fedjax_het.analysis.inspection import list_methods as list_methods
    from fedjax_het.attacks import register_attack as register_attack
    from fedjax_het.config.grid import grid as grid
    from fedjax_het.config.run_spec import RunSpec as RunSpec
    from fedjax_het.core.optimizers import register_optimizer as register_optimizer
    from fedjax_het.data import dataset_from_arrays as dataset_from_arrays
    from fedjax_het.data import dataset_from_object as dataset_from_object
    from fedjax_het.data import load_dataset as load_dataset
    from fedjax_het.data import load_image_folder as load_image_folder
    from fedjax_het.data import make_partition as make_partition
    from fedjax_het.data import register_dataset as register_dataset
    from fedjax_het.data import register_partition as register_partition
    from fedjax_het.data import register_server_source as register_server_source
    from fedjax_het.metrics.declarations import MetricInfo as MetricInfo
    from fedjax_het.metrics.registry import register_metric as register_metric
    from fedjax_het.nn import make_model as make_model
    from fedjax_het.nn import register_network as register_network
    from fedjax_het.runtime.device_report import show_environment as show_environment
    from fedjax_het.runtime.placement import Placement as Placement
    from fedjax_het.runtime.result_store import load_curves as load_curves
    from fedjax_het.runtime.result_store import load_results as load_results
    from fedjax_het.runtime.results import Result as Result
    from fedjax_het.runtime.session import federation as federation
    from fedjax_het.runtime.session import simulate as simulate
    from fedjax_het.runtime.split_measures import measure_split as measure_split
    from fedjax_het.runtime.sweep import sweep as sweep
    from fedjax_het.runtime.trackers import register_tracker as register_tracker
    from fedjax_het.runtime.trained_model import evaluate as evaluate
    from fedjax_het.runtime.trained_model import load_model as load_model
    from fedjax_het.skews import register_skew as register_skew
    from fedjax_het.systems import register_system as register_system
    from fedjax_het.tasks import register_task as register_task
    from fedjax_het.tuning.tuner import tune as tune
    from fedjax_het.utils.errors import ConfigError as ConfigError

# Imported when first used, so that `import fedjax_het` stays fast.
_NAMES_BY_MODULE = {
    "aggregation": ("register_aggregation",),
    "algorithms": ("register_method",),
    "analysis.inspection": ("describe", "list_methods"),
    "attacks": ("register_attack",),
    "config.grid": ("grid",),
    "config.run_spec": ("RunSpec",),
    "core.optimizers": ("register_optimizer",),
    "data": (
        *("load_dataset", "dataset_from_arrays", "dataset_from_object", "load_image_folder"),
        *("make_partition",),
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
    "runtime.split_measures": ("measure_split",),
    "runtime.sweep": ("sweep",),
    "runtime.trackers": ("register_tracker",),
    "runtime.trained_model": ("evaluate", "load_model"),
    "skews": ("register_skew",),
    "systems": ("register_system",),
    "tasks": ("register_task",),
    "tuning.tuner": ("tune",),
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
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"fedjax_het.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
