"""The identity of a result: everything that decides the numbers of a run.

Each part is in the digest that names the files, or is recorded. Recorded parts are compared before
a checkpoint, a final state or a result with this digest is used.

| decides the numbers | in the name | compared |
|---|---|---|
| settings (`RunSpec`), package version, device, precision, 64-bit mode | yes | |
| switches of JAX that change random draws | if not at their defaults | |
| data set, partition, network, optimizer, initial model that are passed as objects | yes | |
| names of classes of such a data set, if a partition or the server's data depend on them | yes | |
| data of a named data set, split of a registered partition | no | if the data can be loaded |
| functions of registered networks, optimizers, metrics, methods and server sources | no | yes |
| versions of JAX, NumPy, flax and optax, other switches of JAX, flags of XLA | no | when resuming |

The generator of random numbers is always `PRNG_IMPL`. A result of other versions or flags is used,
because its numbers differ by rounding; a sweep reports the difference.

The comparison of functions covers their code, their defaults and their closures. It also covers the
functions, classes, arrays and constants of the user's modules that they read. Constants are
numbers, texts, tuples, lists, dictionaries and objects of these. The comparison does not cover code
of installed packages, and empty or mixed lists and dictionaries, which may be caches. It is skipped
if the version of Python differs.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.config.kind_settings import KIND_SETTINGS
from fedjax_het.config.resolve import USER_PROVIDED
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.optimizers import OPTIMIZERS
from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES, Dataset
from fedjax_het.metrics.registry import METRICS, parse_metrics
from fedjax_het.nn import NETWORKS
from fedjax_het.runtime.data_assignment import (
    UserObjects,
    build_partition,
    select_participants,
)
from fedjax_het.utils.arrays import PRNG_IMPL, to_numpy_bits
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.registry import Registry, get_keyword_parameters

IDENTITY_FIELDS = ("fedjax_het", "device", "matmul_precision", "x64")
"""Names of the values of `describe_environment` that are part of every result's digest."""
ENVIRONMENT_FIELDS = ("jax", "jaxlib", "numpy", "flax", "optax", "switches")
"""Names of the other values, between which results differ by rounding."""
ListChanges = Callable[[ResolvedRunSpec, Mapping[str, Any]], list[str]]
"""Type of `RegisteredIdentity.list_changes`."""
_PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(enum.Enum, range, slice, PurePath, np.generic, np.dtype),
)
_INSTALLED_ROOTS = {"fedjax_het", "builtins", *sys.stdlib_module_names} - {"__main__"}
_ADDED_FIELDS = ("local_parameters",)  # of entries, since 0.7: None does not change a digest
_CLASS_TEXTS = ("__module__", "__doc__", "__qualname__")
_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def compute_digest(spec: RunSpec, summary: Mapping[str, Any]) -> str:
    """Return the name of the files of a result.

    Args:
      spec: settings of the run.
      summary: summary of the result; only the values that are part of the name are read.

    Returns:
      16 hexadecimal digits.
    """
    identity = {name: summary.get(name) for name in IDENTITY_FIELDS}
    data = summary.get("dataset_digest") if spec.dataset == USER_PROVIDED else None
    own_data = summary.get("own_dataset") or data
    parts: list[Any] = [spec.digest(), identity, own_data]
    if network := summary.get("network_digest"):
        parts.append(network)
    prng = summary.get("prng")
    optional = {
        "partition": summary.get("own_partition"),
        "initial": summary.get("initial_digest"),
        "optimizer": summary.get("optimizer_digest"),
        "class_names": summary.get("class_names_digest") if own_data else None,
        "prng": None if prng == PRNG_IMPL else prng,
    }
    parts += [{name: digest} for name, digest in optional.items() if digest]
    return _hash_text(json.dumps(parts, sort_keys=True))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compute_class_names_digest(spec: ResolvedRunSpec, dataset: Dataset) -> str | None:
    """Return the digest of a data set's class names if its clients or its server depend on them.

    Args:
      spec: the settings.
      dataset: the data set of the run.

    Returns:
      16 hexadecimal digits; None if no number depends on the names.
    """
    scheme, source = PARTITIONS[spec.partition], spec.server_data
    reads_names = scheme.resolve_parameters is not None
    reads_names |= "class_names" in get_keyword_parameters(scheme.split)
    if source is not None:
        reads_names |= source not in SERVER_SOURCES.built_in
        reads_names |= SERVER_SOURCES[source].pool is not None
    if not (reads_names and dataset.class_names):
        return None
    return _hash_text(json.dumps(list(map(str, dataset.class_names))))


# Registered objects


def collect_function_digests(spec: RunSpec) -> dict[str, str]:
    """Return a digest of each registered object that a run uses, by its kind and name.

    Args:
      spec: resolved settings.

    Returns:
      Digests with the version of Python; objects of the package have none.
    """
    metrics = [metric.name for metric in parse_metrics(spec.metrics)] if spec.metrics else []
    names: list[tuple[Registry[Any], Any]] = [
        (METHODS, spec.algorithm),
        (METHODS, spec.options.get("base")),
        (NETWORKS, spec.model),
        (OPTIMIZERS, spec.local_optimizer),
        (SERVER_SOURCES, spec.server_data),
        *((METRICS, name) for name in metrics),
        *(
            (setting.registry, name)
            for setting in KIND_SETTINGS.values()
            for name in dict.fromkeys(key.partition(".")[0] for key in getattr(spec, setting.name))
        ),
    ]
    return {
        f"{registry.kind} {name}": hash_functions(registry[name])
        for registry, name in names
        if _is_registered(registry, name)
    }


def hash_functions(entry: Any) -> str:
    """Hash the functions and classes among the fields of an entry of a registry.

    Args:
      entry: a named tuple or a dataclass.

    Returns:
      The version of Python and 16 hexadecimal digits.

    Example:
      >>> from typing import NamedTuple
      >>> from fedjax_het.runtime.identity import hash_functions
      >>> class Entry(NamedTuple):
      ...     make: object
      >>> one, same, other = (hash_functions(Entry(f)) for f in (
      ...     lambda a: a + 1, lambda a: a + 1, lambda a: a + 2))
      >>> one == same, one == other
      (True, False)
    """
    fields = entry._asdict() if hasattr(entry, "_asdict") else vars(entry)
    parts = {name: f for name, f in fields.items() if not isinstance(f, str)}  # no descriptions
    for name in _ADDED_FIELDS:
        if parts.get(name, ()) is None:
            del parts[name]
    texts = [f"{name}:{text}" for name, f in sorted(parts.items()) for text in _describe(f, set())]
    digest = _hash_text("\n".join(texts))
    return f"{sys.version_info[0]}.{sys.version_info[1]}-{digest}"


def _describe(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield texts that differ between functions, classes and constants that compute differently."""
    if isinstance(value, _PLAIN_TYPES):
        yield repr(value)
    elif isinstance(value, np.ndarray | jax.Array):
        array = to_numpy_bits(value)
        content = array.tobytes() if array.dtype != object else b""
        yield f"{array.dtype} {array.shape} {hashlib.sha256(content).hexdigest()}"
    elif isinstance(value, tuple):
        for item in value:
            yield from _describe(item, seen)
    elif isinstance(value, frozenset):
        yield from sorted("\n".join(_describe(item, seen)) for item in value)
    elif isinstance(value, list | dict | set) and value and _is_constant(value):
        yield repr(sorted(map(repr, value)) if isinstance(value, set) else value)
    elif id(value) in seen:
        return
    elif isinstance(value, functools.partial):
        yield from _describe((value.func, value.args, *value.keywords.items()), seen)
    elif isinstance(value, property | functools.cached_property):
        yield from _describe(value.fget if isinstance(value, property) else value.func, seen)
    elif inspect.isfunction(value):
        seen.add(id(value))
        yield from _describe_function(value, seen)
    elif inspect.ismethod(value):
        yield from _describe((value.__func__, value.__self__), seen)
    elif isinstance(value, type):
        seen.add(id(value))
        yield value.__qualname__
        parts = [] if _is_installed(value) else sorted(vars(value).items())
        for name, part in parts:
            part = inspect.unwrap(getattr(part, "__func__", part))  # a decorator of flax
            is_written = inspect.isfunction(part) and part.__code__.co_filename != "<string>"
            is_value = isinstance(part, (*_PLAIN_TYPES, property)) and name not in _CLASS_TEXTS
            if is_written or is_value:
                yield from (name, *_describe(part, seen))
    elif "__wrapped__" in getattr(value, "__dict__", ()):  # a function of jax.jit
        seen.add(id(value))
        is_installed = _is_installed(value)
        yield from _describe(value.__qualname__ if is_installed else value.__wrapped__, seen)
    elif isinstance(value, SimpleNamespace) or not _is_installed(type(value)):
        seen.add(id(value))
        yield from _describe_object(value, seen)
    elif callable(value):  # an object, such as a function of NumPy
        yield _MEMORY_ADDRESS.sub("", repr(value))
        yield from _describe(type(value), seen)


def _is_constant(value: Any) -> bool:
    """Return whether a list, a dictionary, a set or a tuple consists of plain constants."""
    if isinstance(value, list | tuple | set):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(map(_is_constant, (*value, *value.values())))
    return isinstance(value, _PLAIN_TYPES)


def _describe_object(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield texts of the class and the attributes of an object of the user, or of a flax module."""
    yield from _describe(type(value), seen)
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)}
    else:
        names = {*getattr(value, "__dict__", ())}
    for name in sorted(names):
        yield from (name, *_describe(getattr(value, name, None), seen))


def _is_installed(function_or_class: Any) -> bool:
    """Return whether a function or a class is part of Python, this package or another one."""
    return _is_installed_name(getattr(function_or_class, "__module__", None) or "")


def _is_installed_name(module: str) -> bool:
    """Return whether the module of a name is part of Python, this package or another one."""
    path = str(getattr(sys.modules.get(module), "__file__", None) or "")
    root = module.partition(".")[0]
    return root in _INSTALLED_ROOTS or "-packages" in path


def _describe_function(function: Any, seen: set[int]) -> Iterator[str]:
    values = [function.__defaults__, *sorted((function.__kwdefaults__ or {}).items())]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            values.append(cell.cell_contents)
    if _is_installed(function):  # a decorator has the user's function in its closure
        yield function.__qualname__
    else:
        names: set[str] = set()
        yield from _describe_code(function.__code__, names, seen)
        namespaces = [function.__globals__]
        for name in names & function.__globals__.keys():
            module = function.__globals__[name]
            if isinstance(module, ModuleType) and not _is_installed_name(module.__name__):
                namespaces.append(vars(module))  # names of its attributes are among `names`
        for namespace in namespaces:
            for name in sorted(names & namespace.keys()):
                values += [name, namespace[name]]
    yield from _describe(tuple(values), seen)


def _describe_code(code: CodeType, names: set[str], seen: set[int]) -> Iterator[str]:
    """Yield texts of compiled code, and collect the names that it looks up."""
    names |= {*code.co_names}
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _describe_code(constant, names, seen)
        else:
            yield from _describe(constant, seen)


# Comparison


class RegisteredIdentity:
    """Computes the recorded values of named objects as they are now, each once and if needed."""

    def __init__(self, user_objects: UserObjects):
        """Store the objects of the user.

        Args:
          user_objects: the objects that are passed to the runs.
        """
        self._user_objects = user_objects
        self._values: dict[str, dict[str, Any]] = {}
        self._dataset: tuple[tuple, Dataset] | None = None
        self._dataset_digests: dict[tuple, str] = {}

    def list_changes(self, spec: ResolvedRunSpec, record: Mapping[str, Any]) -> list[str]:
        """Return the named objects that differ from the record of a run, in words.

        Args:
          spec: settings of the run.
          record: summary of a result, or record of a checkpoint. A missing value is equal.

        Returns:
          Kinds and names.
        """
        key = spec.digest()
        if key not in self._values:
            self._values[key] = self._compute_values(spec)
        values = self._values[key]
        changes = list_function_changes(values["functions"], record)
        fields = {
            "dataset_digest": f"data set {spec.dataset}",
            "class_names_digest": f"class names of {spec.dataset}",
            "partition_digest": f"partition {spec.partition}",
        }
        for field, name in fields.items():
            if (
                None not in (record.get(field), values.get(field))
                and record[field] != values[field]
            ):
                changes.append(name)
        return changes

    def _compute_values(self, spec: ResolvedRunSpec) -> dict[str, Any]:
        """Return the digests of named objects; a data set that cannot be loaded has none."""
        values: dict[str, Any] = {"functions": collect_function_digests(spec)}
        objects = self._user_objects
        has_named_data = objects.get_dataset(spec) is None and spec.dataset != USER_PROVIDED
        has_own_split = objects.partition is None and _is_registered(PARTITIONS, spec.partition)
        if not (has_named_data or has_own_split):
            return values
        try:
            if has_named_data:
                values["dataset_digest"] = self._compute_dataset_digest(spec)
            if has_named_data and spec.dataset not in DATASETS.built_in:
                dataset = self._load_dataset(spec)
                values["class_names_digest"] = compute_class_names_digest(spec, dataset)
            if has_own_split:
                all_clients = build_partition(spec, self._load_dataset(spec))
                partition = select_participants(spec, all_clients).partition
                values["partition_digest"] = partition.digest()
        except (ConfigError, OSError, ImportError):  # the run itself reports it
            pass
        return values

    def _compute_dataset_digest(self, spec: ResolvedRunSpec) -> str:
        key = spec.dataset, spec.normalization
        if key not in self._dataset_digests:
            self._dataset_digests[key] = self._load_dataset(spec).digest()
        return self._dataset_digests[key]

    def _load_dataset(self, spec: ResolvedRunSpec) -> Dataset:
        """Return the data set of a run; the last one is kept for the next call."""
        key = spec.dataset, spec.normalization
        if self._dataset is None or self._dataset[0] != key:
            self._dataset = key, self._user_objects.load_dataset(spec, caller="sweep")
        return self._dataset[1]


def _is_registered(registry: Any, name: str) -> bool:
    return name in registry and name not in registry.built_in


def list_no_changes(spec: ResolvedRunSpec, record: Mapping[str, Any]) -> list[str]:
    """Return no changes, for callers that compare nothing.

    Args:
      spec: not used.
      record: not used.

    Returns:
      An empty list.
    """
    return []


def list_function_changes(functions: Mapping[str, str], record: Mapping[str, Any]) -> list[str]:
    """Return the names of functions whose digests differ from the record of a run.

    Args:
      functions: the result of `collect_function_digests`.
      record: summary of a result, or record of a checkpoint.

    Returns:
      Names that the record has with another digest of the same version of Python.
    """
    stored = record.get("functions") or {}
    return [
        name
        for name, digest in functions.items()
        if name in stored
        and stored[name] != digest
        and stored[name].split("-")[0] == digest.split("-")[0]
    ]


def list_environment_changes(summary: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Return the versions and switches of a result that differ from this process's, as text.

    Args:
      summary: summary of the result.
      environment: result of `describe_environment`.

    Returns:
      Names and values; "" without a difference.
    """
    return ", ".join(
        f"{name} {summary[name]}"
        for name in ENVIRONMENT_FIELDS
        if name in environment and summary.get(name) not in (None, environment[name])
    )
