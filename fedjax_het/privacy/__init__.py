"""Differential privacy of the clients' uploads as a setting: `PrivacyMechanism` and `PRIVACY`."""

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

__all__ = [
    "PRIVACY",
    "PRIVACY_SETTING",
    "ClientLevel",
    "ExampleLevel",
    "PrivacyMechanism",
    "compute_client_level_epsilons",
    "compute_example_level_epsilons",
    "require_dp_accounting",
]
