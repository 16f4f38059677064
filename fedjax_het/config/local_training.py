"""The settings of local training: the optimizer's options, schedules of its rate, accumulation."""

import dataclasses
from typing import Any

from fedjax_het.config.settings import RunSettings, SettingsT
from fedjax_het.core.lr_schedules import (
    LR_SCHEDULES,
    ROUND_PREFIX,
    STEP_PREFIX,
    optional_schedule_hyperparameters,
    required_schedule_hyperparameters,
    schedule_hyperparameters,
)
from fedjax_het.core.optimizers import (
    LR_NAME,
    OPTIMIZERS,
    USER_OBJECT,
    optional_optimizer_hyperparameters,
)
from fedjax_het.utils.config import HyperParameter
from fedjax_het.utils.errors import require, require_name

_LR_LENGTH = f"{ROUND_PREFIX}length"


def resolve_local_training(spec: SettingsT) -> SettingsT:
    """Check the settings of local training, and drop those that equal their defaults.

    Defaults are an optimizer's option at its default, a constant rate, and steps of one minibatch.

    Raises:
      ConfigError: if a setting cannot be used.
    """
    name, options = spec.local_optimizer, dict(spec.optimizer_options)
    default_options = {} if name in (None, USER_OBJECT) else OPTIMIZERS[str(name)].options
    for option, value in options.items():
        require_name("optimizer_options", option, default_options)
        expected = "True or False"
        require(isinstance(value, bool), f"optimizer_options {option}", value, expected)
    options = {
        option: value for option, value in options.items() if value != default_options[option]
    }
    cleared_settings: dict[str, Any] = {}
    for setting, prefix in _schedule_settings():
        schedule = getattr(spec, setting)
        if schedule == "constant" and f"{prefix}warmup" not in spec.hp:
            cleared_settings[setting] = None
        elif schedule is not None and name == USER_OBJECT:
            _require_learning_rate(spec, setting, schedule)
    accumulation = None if spec.accumulation == 1 else spec.accumulation
    return dataclasses.replace(
        spec, optimizer_options=options, accumulation=accumulation, **cleared_settings
    )


def _require_learning_rate(spec: RunSettings, setting: str, schedule: str) -> None:
    """Require that a user's optimizer reads the rate from `hp`; then it can vary over rounds."""
    over_steps = "none over steps: an optimizer that is passed has its own"
    require(setting == "lr_schedule", setting, schedule, over_steps)
    expected = f"hp {LR_NAME}, which an optimizer that is passed reads as a function of hp"
    require(LR_NAME in spec.hp, setting, schedule, expected)


def _schedule_settings() -> tuple[tuple[str, str], ...]:
    return ("lr_schedule", ROUND_PREFIX), ("lr_step_schedule", STEP_PREFIX)


def lr_schedule_hyperparameters(spec: RunSettings) -> dict[str, HyperParameter]:
    """Return the hyper-parameters that the run's schedules always have."""
    hyperparameters: dict[str, HyperParameter] = {}
    for setting, prefix in _schedule_settings():
        if (schedule := getattr(spec, setting)) is not None:
            hyperparameters |= schedule_hyperparameters(schedule, prefix)
    return hyperparameters


def optional_hyperparameters(spec: RunSettings) -> dict[str, HyperParameter]:
    """Return the hyper-parameters of local training that are used only where they are set."""
    if spec.local_optimizer is None:
        return {}
    hyperparameters = optional_optimizer_hyperparameters(spec.local_optimizer, spec.hp)
    for setting, prefix in _schedule_settings():
        if (schedule := getattr(spec, setting)) is not None:
            hyperparameters |= optional_schedule_hyperparameters(schedule, prefix)
    return hyperparameters


def require_schedule_hyperparameters(spec: RunSettings, hp: dict[str, float]) -> None:
    """Raise ConfigError for a number of a schedule that has no default and is not given."""
    for setting, prefix in _schedule_settings():
        if (schedule := getattr(spec, setting)) is not None:
            for name in required_schedule_hyperparameters(schedule, prefix):
                unit = "rounds" if prefix == ROUND_PREFIX else "steps"
                expected = f"a number of {unit} >= 1, for {setting} {schedule}"
                require(name in hp, f"hp {name}", None, expected)


def is_horizon_dependent(spec: RunSettings) -> bool:
    """Return whether the rates of a run's rounds depend on its number of rounds.

    They do if its schedule over rounds comes to an end (cosine, linear, polynomial) that `hp` does
    not set as `lr_length`. Such a run is not the beginning of a longer one.
    """
    schedule = spec.lr_schedule
    return schedule is not None and LR_SCHEDULES[schedule].has_length and _LR_LENGTH not in spec.hp
