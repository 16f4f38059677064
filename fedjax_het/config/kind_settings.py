"""Settings of a run that combine kinds of a registry."""

from typing import Any

from fedjax_het.aggregation import AGGREGATION_SETTING
from fedjax_het.attacks import ATTACK_SETTING, DataAttack
from fedjax_het.privacy import PRIVACY_SETTING
from fedjax_het.skews import SKEW_SETTING, Skew
from fedjax_het.systems import SYSTEM_SETTING
from fedjax_het.utils.kinds import KindSetting

KIND_SETTINGS: dict[str, KindSetting[Any]] = {
    setting.name: setting
    for setting in (
        *(SKEW_SETTING, SYSTEM_SETTING, ATTACK_SETTING, AGGREGATION_SETTING, PRIVACY_SETTING),
    )
}
"""The settings by name."""


def get_neutral_strength(column: str) -> float | None:
    """Return the value of a column at which a kind changes nothing.

    Args:
      column: name of a setting with dots, such as "skew.noise.std".

    Returns:
      The neutral value if the column is the strength of a kind; None for other columns, and for
      kinds that change a run at every strength.

    Example:
      >>> from fedjax_het.config.kind_settings import get_neutral_strength
      >>> get_neutral_strength("skew.noise.std"), get_neutral_strength("skew.noise.levels")
      (0, None)
    """
    setting, _, key = column.partition(".")
    name, _, field = key.partition(".")
    entry = KIND_SETTINGS[setting].registry.get(name) if setting in KIND_SETTINGS else None
    return entry.make.neutral if entry is not None and field == entry.make.strength else None


def list_skews(spec: Any) -> tuple[Skew, ...]:
    """Return the skews of a run, and the data of its malicious clients as skews.

    Args:
      spec: resolved settings of the run.

    Returns:
      The skews in the order of their application.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.config.kind_settings import list_skews
      >>> [skew.name for skew in list_skews(RunSpec(attack="label_flip").resolved())]
      ['attack']
    """
    attacks = ATTACK_SETTING.parse(spec.attack)
    malicious = [
        skew
        for attack in attacks
        if isinstance(attack, DataAttack)
        for skew in attack.make_skews(spec.partition_seed)
    ]
    return (*SKEW_SETTING.parse(spec.skew), *malicious)
