"""Robust aggregation of client updates as a setting: `Aggregation` and the registry `AGGREGATIONS`.

The server first clips the updates, then averages buckets of them, and then combines them by a rule.
Without a rule it takes the weighted mean.
"""

from fedjax_het.aggregation.base import (
    Aggregation,
    ClientUpdates,
    RobustAggregation,
    UpdateClipping,
)
from fedjax_het.aggregation.rules import (
    Bucketing,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    NormClipping,
    TrimmedMean,
)
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.kinds import KindSetting

_KINDS: tuple[type[Aggregation], ...] = (
    *(NormClipping, Bucketing),
    *(Median, TrimmedMean, GeometricMedian, Krum, CenteredClipping),
)
AGGREGATION_SETTING: KindSetting[Aggregation] = KindSetting(
    "aggregation", Aggregation, _KINDS, example="trimmed_mean:fraction=0.2"
)
"""The setting `aggregation`."""
AGGREGATIONS = AGGREGATION_SETTING.registry
"""Kinds of aggregation by name, in the order of their application."""


@validate_arguments
def register_aggregation(kind: type) -> type:
    """Register a rule of the user for runs, sweeps and reports, until the process ends.

    Args:
      kind: frozen dataclass that inherits `RobustAggregation`, which replaces the mean, or
        `UpdateClipping`, and has the class variables `name` and `strength`. Its fields are the
        parameters of the rule and have defaults. The first line of its docstring is its default
        `description`.

    Returns:
      The class, so that the function also serves as its decorator.

    Raises:
      ConfigError: if `kind` is no such class, or if its name belongs to a rule of the package or is
        not an identifier.

    Example:
      >>> from dataclasses import dataclass
      >>> from typing import ClassVar
      >>> import jax
      >>> from fedjax_het import RunSpec, register_aggregation
      >>> from fedjax_het.aggregation import RobustAggregation
      >>> @register_aggregation
      ... @dataclass(frozen=True, kw_only=True)
      ... class Midrange(RobustAggregation):
      ...     "Share of the mean of the largest and the smallest value."
      ...     share: float = 1.0
      ...     name: ClassVar[str] = "midrange"
      ...     strength: ClassVar[str] = "share"
      ...     def combine(self, updates):
      ...         return jax.tree.map(
      ...             lambda u: self.share * (u.max(0) + u.min(0)) / 2, updates.changes
      ...         )
      >>> RunSpec(aggregation="midrange:share=0.5").resolved().aggregation
      {'midrange.share': 0.5}
    """
    AGGREGATION_SETTING.register(kind, (RobustAggregation, UpdateClipping))
    return kind


__all__ = [
    "AGGREGATIONS",
    "AGGREGATION_SETTING",
    "Aggregation",
    "Bucketing",
    "CenteredClipping",
    "ClientUpdates",
    "GeometricMedian",
    "Krum",
    "Median",
    "NormClipping",
    "RobustAggregation",
    "TrimmedMean",
    "UpdateClipping",
    "register_aggregation",
]
