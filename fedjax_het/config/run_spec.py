"""The specification of one run: its settings, their resolution, and the hash that names the run."""

import hashlib
import json
from typing import Any

import yaml

from fedjax_het.config.resolve import resolve_settings
from fedjax_het.config.settings import RunSettings


class RunSpec(RunSettings):
    """Everything that decides a run's numbers. `None` means: as in the method's paper.

    `hp` holds numeric hyper-parameters (traced: changing one never recompiles), `options` the
    method's static choices (a preset, SCAFFOLD's option). `spec.resolved()` fills every `None`.
    """

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunSpec":
        """Return the run whose settings `to_dict` returned."""
        return cls(**values)

    def resolved(self) -> "ResolvedRunSpec":
        """Return the run with every default written out, after checking every setting.

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
    """The settings of a run with every default written out, all of them checked.

    Only `RunSpec.resolved` creates one. The class itself and `dataclasses.replace` return a
    `RunSpec`, because changed settings must be resolved again.

    Settings of local training may still be None: clients that condense their data have none.
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
        return RunSpec(*args, **settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return mark_as_resolved, (RunSpec(**vars(self)),)

    def resolved(self) -> "ResolvedRunSpec":
        """Return this run, which is resolved already."""
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
    """Return the digest of settings as they are, without resolving them.

    Settings that are stored in a file may name what only another process has registered.

    Args:
      spec: resolved settings.

    Returns:
      16 hexadecimal digits.
    """
    text = json.dumps(spec.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_to_yaml(spec: RunSpec) -> str:
    """Return the YAML text from which the run can be repeated, settings in their order."""
    settings = {name: value for name, value in spec.to_dict().items() if value not in (None, {})}
    return yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
