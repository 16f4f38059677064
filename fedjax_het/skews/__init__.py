"""Kinds of heterogeneity as settings that combine: `Skew` and the registry `SKEWS`.

A run applies its skews in the order of `SKEWS`: numbers of examples, labels, drift, images.
"""

from fedjax_het.skews.amounts import AmountSkew, LongTail, PowerLaw, Quantity
from fedjax_het.skews.base import FeatureSkew, LevelSkew, Skew
from fedjax_het.skews.drift import ClassArrival, ClientChurn, DriftSkew, LabelDrift
from fedjax_het.skews.feature import (
    Blur,
    Color,
    Contrast,
    Inversion,
    Noise,
    PixelPermutation,
    Resolution,
    Rotation,
)
from fedjax_het.skews.labels import ConceptShift, LabelNoise, LabelSkew
from fedjax_het.utils.kinds import KindSetting

PARTITION_SKEWS = {
    "label": "dirichlet",
    "label_quantity": "classes_per_client",
    "domain": "by_domain",
    "natural": "natural",
}
"""Partitions that the setting `skew` also accepts, by the name of the skew."""
_KINDS: tuple[type[Skew], ...] = (
    *(LongTail, Quantity, PowerLaw),
    *(LabelNoise, ConceptShift),
    *(LabelDrift, ClassArrival, ClientChurn),
    *(Rotation, Inversion, Contrast, Color, Blur, Resolution, PixelPermutation, Noise),
)
SKEW_SETTING: KindSetting[Skew] = KindSetting(
    "skew", Skew, _KINDS, example="noise:std=0.3", other_names=PARTITION_SKEWS
)
"""The setting `skew`."""
SKEWS = SKEW_SETTING.registry
"""Kinds of skews by name, in the order of their application."""

__all__ = [
    "PARTITION_SKEWS",
    "SKEWS",
    "SKEW_SETTING",
    "AmountSkew",
    "Blur",
    "ClassArrival",
    "ClientChurn",
    "Color",
    "ConceptShift",
    "Contrast",
    "DriftSkew",
    "FeatureSkew",
    "Inversion",
    "LabelDrift",
    "LabelNoise",
    "LabelSkew",
    "LevelSkew",
    "LongTail",
    "Noise",
    "PixelPermutation",
    "PowerLaw",
    "Quantity",
    "Resolution",
    "Rotation",
    "Skew",
]
