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
]
