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
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.kinds import KindSetting

PARTITION_SKEWS = {
    "label": "dirichlet",
    "label_quantity": "classes_per_client",
    "domain": "by_domain",
    "natural": "natural",
}
"""Partitions that the setting `skew` also accepts, by the name of the skew."""
PARTITION_SKEW_EXAMPLES = {
    "label": "label:alpha=0.1",
    "label_quantity": "label_quantity:classes=2",
}
"""Valid texts of the partitions that have required parameters, by the name of the skew."""
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
"""Kinds of skews by name, in the order of their application.

Example:
  >>> from fedjax_het.skews import SKEWS
  >>> SKEWS["noise"].make(std=0.1)
  Noise(levels='ramp', groups=2, std=0.1)
"""

_BASES = (FeatureSkew, LabelSkew, AmountSkew, DriftSkew)


@validate_arguments
def register_skew(kind: type) -> type:
    """Register a kind of skew of the user for runs, sweeps and reports, until the process ends.

    Skews of users apply after the skews of the package that change the data in one way, for example
    after all other skews of images.

    Args:
      kind: frozen dataclass that inherits `FeatureSkew`, `LabelSkew`, `AmountSkew` or `DriftSkew`
        and has the class variables `name` and `strength`. Its fields are the parameters of the
        skew and have defaults. The first line of its docstring is its default `description`.

    Returns:
      The class, so that the function also serves as its decorator.

    Raises:
      ConfigError: if `kind` is no such class, or if its name belongs to a skew of the package or is
        not an identifier.

    Example:
      >>> from dataclasses import dataclass
      >>> from typing import ClassVar
      >>> from fedjax_het import RunSpec, register_skew
      >>> from fedjax_het.skews import FeatureSkew
      >>> @register_skew
      ... @dataclass(frozen=True, kw_only=True)
      ... class Brightness(FeatureSkew):
      ...     "Brighter images, of increasing strength over clients."
      ...     shift: float = 0.2
      ...     name: ClassVar[str] = "brightness"
      ...     strength: ClassVar[str] = "shift"
      ...     @staticmethod
      ...     def transform(images, parameters, shared, keys):
      ...         return images + parameters
      >>> RunSpec(skew="brightness:shift=0.3").resolved().skew
      {'brightness.shift': 0.3}
    """
    SKEW_SETTING.register(kind, _BASES)
    return kind


__all__ = [
    "PARTITION_SKEWS",
    "PARTITION_SKEW_EXAMPLES",
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
    "register_skew",
]
