"""Specification of a run: its settings, their resolution, and the hash that names the run."""

import hashlib
import json
from typing import Any

from fedjax_het.config.resolve import resolve_settings
from fedjax_het.config.settings import (
    ADDED_OPTION_DEFAULTS,
    FORMER_SETTING_NAMES,
    RunSettings,
    get_former_protocol,
    rename_former_settings,
)
from fedjax_het.utils.config import rename_former_arguments
from fedjax_het.utils.yaml_files import dump_yaml


class RunSpec(RunSettings):
    """All settings on which the numbers of a run depend.

    None stands for the value of the protocol; `resolved` replaces every None. `hp` contains numeric
    hyperparameters, whose change never recompiles. `options` contains static choices of the method,
    e.g. a preset.

    Example:
      >>> from fedjax_het import RunSpec
      >>> spec = RunSpec("fedprox", dataset="digits", alpha=0.1, hp={"prox_mu": 0.01})
      >>> resolved = spec.resolved()
      >>> resolved.protocol, resolved.num_clients, resolved.local_optimizer, len(spec.digest())
      ('standard', 10, 'momentum', 16)
    """

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunSpec":
        """Return the run whose settings `to_dict` returned."""
        return cls(**rename_former_settings(values))

    def resolved(self) -> "ResolvedRunSpec":
        """Return the run with every default written out, after validating every setting.

        Raises:
          ConfigError: if a setting cannot be used.
        """
        return mark_as_resolved(resolve_settings(self))

    def digest(self) -> str:
        """Return the 16 hexadecimal digits that name this run: a hash of the resolved settings.

        Raises:
          ConfigError: if a setting cannot be used.
        """
        return self.resolved().digest()


class ResolvedRunSpec(RunSpec):
    """Validated settings of a run with every default written out.

    `RunSpec.resolved` creates them. The class itself and `dataclasses.replace` return a `RunSpec`,
    because changed settings must be resolved again. Settings of local training are None for methods
    whose clients condense their data.
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
        return mark_as_resolved, (RunSpec(**vars(self)),)

    def resolved(self) -> "ResolvedRunSpec":
        """Return this run."""
        return self

    def digest(self) -> str:
        """Return the 16 hexadecimal digits that name this run: a hash of its settings."""
        return hash_settings(self)


def mark_as_resolved(spec: RunSettings) -> ResolvedRunSpec:
    """Return resolved settings as an instance of `ResolvedRunSpec`; for `RunSpec` and pickle."""
    resolved = object.__new__(ResolvedRunSpec)
    vars(resolved).update(vars(spec))
    return resolved


def hash_settings(spec: RunSpec) -> str:
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
    options = settings["options"].items()
    settings["options"] = {k: v for k, v in options if (k, v) not in ADDED_OPTION_DEFAULTS.items()}
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_to_yaml(spec: RunSpec) -> str:
    """Return YAML text from which `fedjax-het run --config` repeats the run."""
    settings = {name: value for name, value in spec.to_dict().items() if value not in (None, {})}
    return dump_yaml(settings)
