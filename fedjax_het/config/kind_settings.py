"""Settings of a run that combine kinds of a registry."""

from typing import Any

from fedjax_het.skews import SKEW_SETTING
from fedjax_het.systems import SYSTEM_SETTING
from fedjax_het.utils.kinds import KindSetting

KIND_SETTINGS: dict[str, KindSetting[Any]] = {
    setting.name: setting for setting in (SKEW_SETTING, SYSTEM_SETTING)
}
"""The settings by name."""
