"""Specification of a run: its settings, their resolution, and the hash that names the run."""

import dataclasses
import hashlib
import itertools
import json
import textwrap
from typing import Any

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.config.resolve import resolve_settings, validate_run
from fedjax_het.config.settings import (
    ADDED_DEFAULTS,
    FORMER_SETTING_NAMES,
    RunSettings,
    get_former_protocol,
    rename_former_settings,
    separate_hyperparameters,
)
from fedjax_het.utils.config import get_field_docs
from fedjax_het.utils.former_names import rename_former_arguments
from fedjax_het.utils.text import make_html_table
from fedjax_het.utils.yaml_files import dump_yaml


class RunSpec(RunSettings):
    """All settings on which the numbers of a run depend.

    None stands for the default of the protocol; `resolved` replaces every None. The constructor
    raises ConfigError for a setting that cannot be used. Learning rates are settings; the method's
    other hyperparameters are in `hp`. Their change never recompiles. `options` contains static
    choices of the method, e.g. a preset. Specs are hashable, and equal specs have equal hashes.

    Example:
      >>> from fedjax_het import RunSpec
      >>> spec = RunSpec("fedprox", "digits", alpha=0.1, learning_rate=0.05, hp={"prox_mu": 0.01})
      >>> resolved = spec.resolved()
      >>> resolved.protocol, resolved.num_clients, resolved.learning_rate, len(spec.digest())
      ('standard', 10, 0.05, 16)
    """

    def __post_init__(self) -> None:
        """Validate the settings; a learning rate in `hp` replaces the setting.

        Raises:
          ConfigError: if a setting cannot be used.
        """
        super().__post_init__()
        vars(self).update(vars(validate_run(self)))

    def __repr__(self) -> str:
        return _format_call(type(self).__name__, self._list_given())

    def _repr_html_(self) -> str:
        return make_html_table(self._list_given().items())

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """Return what treescope shows: the settings of `__repr__`."""
        from treescope import repr_lib

        settings = self._list_given()
        return repr_lib.render_object_constructor(type(self), settings, path, subtree_renderer)

    def _list_given(self) -> dict[str, Any]:
        """Return method, data set, and the settings that differ from their defaults, by name."""
        given = {"algorithm": self.algorithm, "dataset": self.dataset}
        for field in dataclasses.fields(RunSettings):
            value = getattr(self, field.name)
            if value != field.default and value != {}:
                given[field.name] = value
        return given

    @classmethod
    def from_settings(cls, settings: RunSettings) -> "RunSpec":
        """Return the run of settings that are valid, or valid in another process."""
        spec = object.__new__(RunSpec)
        vars(spec).update(vars(separate_hyperparameters(settings)))
        return spec

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunSpec":
        """Return the run whose settings `to_dict` returned; `resolved` validates them.

        Stored settings may name entries that only another process has registered.

        Args:
          values: settings by name.

        Returns:
          The run.
        """
        return cls.from_settings(RunSettings(**rename_former_settings(values)))

    def resolved(self) -> "ResolvedRunSpec":
        """Return the run with every default written out, after validating every setting.

        Raises:
          ConfigError: if a setting cannot be used.
        """
        return mark_as_resolved(resolve_settings(self))

    def digest(self) -> str:
        """Return the 16 hexadecimal digits that name this run: a hash of the resolved settings.

        For the partition `natural` of data from files, the default of `num_clients` is known once
        the data are read. The digest is then `result.spec.digest()`.

        Raises:
          ConfigError: if a setting cannot be used.
        """
        return self.resolved().digest()


class ResolvedRunSpec(RunSpec):
    """Validated settings of a run with every default written out.

    `RunSpec.resolved` creates them. The class itself and `dataclasses.replace` return a `RunSpec`,
    because changed settings must be resolved again. Settings of local training are None for methods
    whose clients condense their data.

    Example:
      >>> from fedjax_het import RunSpec
      >>> resolved = RunSpec("fedavg", "digits").resolved()
      >>> type(resolved).__name__, resolved.partition, resolved.num_clients
      ('ResolvedRunSpec', 'dirichlet_capped', 10)
    """

    partition: str
    model: str
    num_clients: int
    participation: float
    batch_size: int
    rounds: int
    partition_seed: int
    protocol: str

    def __new__(cls, *args: Any, **settings: Any) -> RunSpec:  # type: ignore[misc]
        """Return a `RunSpec`, whose settings must be resolved again."""
        return RunSpec(*args, **settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return mark_as_resolved, (RunSpec.from_settings(self),)

    def _list_given(self) -> dict[str, Any]:
        """Return the settings that have a value, without options at the method's defaults.

        The protocol follows method and data set.
        """
        given = super()._list_given()
        defaults = get_algorithm_spec(self.algorithm, self.options).complete_options({})
        options = {name: v for name, v in self.options.items() if v != defaults.get(name, self)}
        if not options:
            given.pop("options", None)
        first = {name: given[name] for name in ("algorithm", "dataset", "protocol")}
        return first | given | ({"options": options} if options else {})

    def resolved(self) -> "ResolvedRunSpec":
        """Return this run."""
        return self

    def digest(self) -> str:
        """Return the 16 hexadecimal digits that name this run: a hash of its settings."""
        return hash_settings(self)


def mark_as_resolved(spec: RunSettings) -> ResolvedRunSpec:
    """Return resolved settings as an instance of `ResolvedRunSpec`; for `RunSpec` and pickle."""
    resolved = object.__new__(ResolvedRunSpec)
    vars(resolved).update(vars(separate_hyperparameters(spec)))
    return resolved


def _format_call(name: str, settings: dict[str, Any]) -> str:
    """Return a call in Python, in lines of at most 100 characters."""
    arguments = [repr(settings["algorithm"]), repr(settings["dataset"])]
    for setting, value in itertools.islice(settings.items(), 2, None):
        if isinstance(value, dict) and value:  # a line may end after each item
            first, *others = (f"{key!r}: {item!r}" for key, item in value.items())
            arguments += [f"{setting}={{{first}", *others]
            arguments[-1] += "}"
        else:
            arguments.append(f"{setting}={value!r}")
    lines = [f"{name}({arguments[0]}"]
    for argument in arguments[1:]:
        if len(lines[-1]) + len(argument) > 96:
            lines.append(f"    {argument}")
            lines[-2] += ","
        else:
            lines[-1] += f", {argument}"
    return "\n".join(lines) + ")"


class _DocumentedFields:
    """Docstring of a class with the documentation of its fields, which is read when it is shown."""

    def __init__(self, text: str):
        self.text = text

    def __get__(self, instance: object, owner: type) -> str:
        summary, _, example = self.text.partition("    Example:\n")
        lines = ["Attributes:"]
        texts = get_field_docs(RunSettings)
        for field in dataclasses.fields(RunSettings):
            text, bounds = texts[field.name], str(field.metadata.get("bounds", ""))
            text += f" Allowed: {bounds}." if bounds not in text else ""
            if field.default not in (None, dataclasses.MISSING):
                text += f" Default: {field.default!r}."
            lines.append(textwrap.fill(f"  {field.name}: {text}", 96, subsequent_indent="    "))
        attributes = textwrap.indent("\n".join(lines), "    ")
        return f"{summary}{attributes}\n\n    Example:\n{example}"


if RunSpec.__doc__:  # Python does not keep it with the option -OO
    RunSpec.__doc__ = _DocumentedFields(RunSpec.__doc__)  # type: ignore[assignment]


def hash_settings(spec: RunSettings) -> str:
    """Return the digest of settings without resolving them.

    Settings in a file may name entries that only another process has registered.

    Args:
      spec: resolved settings.

    Returns:
      16 hexadecimal digits.
    """
    digest_names = {name: former_name for former_name, name in FORMER_SETTING_NAMES.items()}
    settings = rename_former_arguments(spec.to_dict(), digest_names)
    if settings["protocol"] in (None, get_former_protocol(spec.algorithm)):
        del settings["protocol"]
    for field, defaults in ADDED_DEFAULTS.items():
        values = settings[field].items()
        settings[field] = {k: v for k, v in values if (k, v) not in defaults.items()}
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_to_yaml(spec: RunSpec) -> str:
    """Return YAML text from which `fedjax-het run --config` repeats the run."""
    settings = {name: value for name, value in spec.to_dict().items() if value not in (None, {})}
    return dump_yaml(settings)
