"""Differential privacy of the clients' uploads as a setting: `PrivacyMechanism` and `PRIVACY`."""

from typing import Any

from fedjax_het.privacy.accounting import (
    compute_client_level_epsilons,
    compute_example_level_epsilons,
    require_dp_accounting,
)
from fedjax_het.privacy.mechanisms import ClientLevel, ExampleLevel, PrivacyMechanism
from fedjax_het.utils.kinds import KindSetting

_KINDS: tuple[type[PrivacyMechanism], ...] = (ClientLevel, ExampleLevel)
PRIVACY_SETTING: KindSetting[PrivacyMechanism] = KindSetting(
    "privacy", PrivacyMechanism, _KINDS, example="client_level:noise_multiplier=1"
)
"""The setting `privacy`."""
PRIVACY = PRIVACY_SETTING.registry
"""Mechanisms of differential privacy by name."""


def get_privacy_mechanism(run: Any) -> PrivacyMechanism | None:
    """Return the mechanism of differential privacy of a run; None without privacy.

    Args:
      run: arguments of the run.

    Returns:
      The mechanism that `run.privacy` names.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.privacy import get_privacy_mechanism
      >>> get_privacy_mechanism(RunSpec(privacy="client_level:noise_multiplier=2")).noise_multiplier
      2.0
    """
    return next(iter(PRIVACY_SETTING.parse(run.privacy)), None)


__all__ = [
    "PRIVACY",
    "PRIVACY_SETTING",
    "ClientLevel",
    "ExampleLevel",
    "PrivacyMechanism",
    "compute_client_level_epsilons",
    "compute_example_level_epsilons",
    "get_privacy_mechanism",
    "require_dp_accounting",
]
