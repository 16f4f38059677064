"""The settings of local training: an optimiser's options, schedules of its rate, accumulation."""

import dataclasses
from typing import Any

from fedjax_het.common.errors import require, require_name
from fedjax_het.common.records import Number
from fedjax_het.engine.optimizers import OPTIMIZERS, OWN, RATE, optional_numbers
from fedjax_het.engine.rate_schedules import (
    OVER_ROUNDS,
    OVER_STEPS,
    SCHEDULES,
    optional_schedule_numbers,
    required_schedule_numbers,
    schedule_numbers,
)
from fedjax_het.settings.spec import RunSpec

_LENGTH = f"{OVER_ROUNDS}length"


def with_local_training(spec: RunSpec) -> RunSpec:
    """Checked, and unsaid where it is as without saying: an optimiser's option at its default, a
    rate that stays as it is, steps of one minibatch. Raises ConfigError."""
    name, options = spec.local_optimizer, dict(spec.optimizer_options)
    usual = {} if name in (None, OWN) else OPTIMIZERS[str(name)].options
    for each, value in options.items():
        require_name("optimizer_options", each, usual)
        right = "True or False"
        require(isinstance(value, bool), f"optimizer_options {each}", value, right)
    options = {each: value for each, value in options.items() if value != usual[each]}
    unsaid: dict[str, Any] = {}
    for setting, prefix in _schedules():
        schedule = getattr(spec, setting)
        if schedule == "constant" and f"{prefix}warmup" not in spec.hp:
            unsaid[setting] = None
        elif schedule is not None and name == OWN:
            _require_rate(spec, setting, schedule)
    accumulation = None if spec.accumulation == 1 else spec.accumulation
    return dataclasses.replace(spec, optimizer_options=options, accumulation=accumulation, **unsaid)


def _require_rate(spec: RunSpec, setting: str, schedule: str) -> None:
    """Of the user's own optimiser only what it reads of `hp` can have a schedule, over rounds."""
    over_steps = "none over steps: an optimizer that is passed has its own"
    require(setting == "lr_schedule", setting, schedule, over_steps)
    needs = f"hp {RATE}, which an optimizer that is passed reads as a function of hp"
    require(RATE in spec.hp, setting, schedule, needs)


def _schedules() -> tuple[tuple[str, str], ...]:
    return ("lr_schedule", OVER_ROUNDS), ("lr_step_schedule", OVER_STEPS)


def numbers_of_schedules(spec: RunSpec) -> dict[str, Number]:
    """The hyper-parameters that its schedules have."""
    known: dict[str, Number] = {}
    for setting, prefix in _schedules():
        if (schedule := getattr(spec, setting)) is not None:
            known |= schedule_numbers(schedule, prefix)
    return known


def optional_numbers_of(spec: RunSpec) -> dict[str, Number]:
    """Those of local training that it has only where they are given."""
    if spec.local_optimizer is None:
        return {}
    known = optional_numbers(spec.local_optimizer, spec.hp)
    for setting, prefix in _schedules():
        if (schedule := getattr(spec, setting)) is not None:
            known |= optional_schedule_numbers(schedule, prefix)
    return known


def require_numbers(spec: RunSpec, given: dict[str, float]) -> None:
    """Raise ConfigError for a number of a schedule that has no default and is not given."""
    for setting, prefix in _schedules():
        if (schedule := getattr(spec, setting)) is not None:
            for name in required_schedule_numbers(schedule, prefix):
                what = "rounds" if prefix == OVER_ROUNDS else "steps"
                needs = f"a number of {what} >= 1, for {setting} {schedule}"
                require(name in given, f"hp {name}", None, needs)


def depends_on_end(spec: RunSpec) -> bool:
    """Whether the rates of a run's rounds depend on how many rounds it has, so that it is not the
    beginning of a longer one: where its schedule over rounds comes to an end (cosine, linear,
    polynomial) that `hp` does not fix as `lr_length`."""
    schedule = spec.lr_schedule
    return schedule is not None and SCHEDULES[schedule].ends and _LENGTH not in spec.hp
