"""Attacks of malicious clients as a setting: `Attack` and the registry `ATTACKS`."""

from fedjax_het.attacks.backdoor import Backdoor
from fedjax_het.attacks.base import Attack, DataAttack, LabelAttack, UpdateAttack
from fedjax_het.attacks.labels import LabelFlip
from fedjax_het.attacks.updates import ALIE, GaussianUpdate, InnerProduct, ScaledUpdate, SignFlip
from fedjax_het.utils.kinds import KindSetting

_KINDS: tuple[type[Attack], ...] = (
    *(LabelFlip, Backdoor, SignFlip, ScaledUpdate, GaussianUpdate, ALIE, InnerProduct),
)
ATTACK_SETTING: KindSetting[Attack] = KindSetting(
    "attack", Attack, _KINDS, example="sign_flip:fraction=0.2"
)
"""The setting `attack`."""
ATTACKS = ATTACK_SETTING.registry
"""Kinds of attacks by name, in the order of their application."""

__all__ = [
    "ALIE",
    "ATTACKS",
    "ATTACK_SETTING",
    "Attack",
    "Backdoor",
    "DataAttack",
    "GaussianUpdate",
    "InnerProduct",
    "LabelAttack",
    "LabelFlip",
    "ScaledUpdate",
    "SignFlip",
    "UpdateAttack",
]
