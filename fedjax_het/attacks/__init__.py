"""Attacks of malicious clients as a setting: `Attack` and the registry `ATTACKS`."""

from fedjax_het.attacks.backdoor import Backdoor
from fedjax_het.attacks.base import Attack, DataAttack, LabelAttack, UpdateAttack
from fedjax_het.attacks.labels import LabelFlip
from fedjax_het.attacks.updates import ALIE, GaussianUpdate, InnerProduct, ScaledUpdate, SignFlip
from fedjax_het.utils.config import validate_arguments
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


@validate_arguments
def register_attack(kind: type) -> type:
    """Register an attack of the user for runs, sweeps and reports, until the process ends.

    Args:
      kind: frozen dataclass that inherits `UpdateAttack` or `LabelAttack` and has the class
        variable `name`. Its fields are the parameters of the attack and have defaults. The first
        line of its docstring is its default `description`.

    Returns:
      The class, so that the function also serves as its decorator.

    Raises:
      ConfigError: if `kind` is no such class, or if its name belongs to an attack of the package or
        is not an identifier.

    Example:
      >>> from dataclasses import dataclass
      >>> from typing import ClassVar
      >>> import jax
      >>> from fedjax_het import RunSpec, register_attack
      >>> from fedjax_het.attacks import UpdateAttack
      >>> @register_attack
      ... @dataclass(frozen=True, kw_only=True)
      ... class FreeRider(UpdateAttack):
      ...     "The update is zero."
      ...     name: ClassVar[str] = "free_rider"
      ...     def forge(self, updates, is_malicious, key):
      ...         return jax.tree.map(lambda u: 0 * u, updates.changes)
      >>> RunSpec(attack="free_rider:fraction=0.3").resolved().attack
      {'free_rider.fraction': 0.3}
    """
    ATTACK_SETTING.register(kind, (UpdateAttack, DataAttack))
    return kind


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
    "register_attack",
]
