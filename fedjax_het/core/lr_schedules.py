"""Schedules of the local rate, over rounds and over a client's steps: factors of `local_lr`.

Their hyperparameters are `lr_<name>` over rounds and `lr_step_<name>` over steps. Over rounds the
host computes one factor for each round. Over steps the hyperparameters are traced. A sweep over
them compiles nothing in either case.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_het.utils.config import Bounds, HyperParameter
from fedjax_het.utils.registry import Registry, format_entry

ROUND_PREFIX, STEP_PREFIX = "lr_", "lr_step_"
Values = Mapping[str, Any]


class LRSchedule(NamedTuple):
    """A schedule of the rate, relative to its maximum."""

    name: str
    description: str
    factor: Callable[[Any, Any, Any, Values], Any]
    "`factor(xp, t, length, values)` after t rounds or steps; `xp` is NumPy or jax.numpy."
    hyperparameters: dict[str, HyperParameter] = {}  # noqa: RUF012
    "Hyperparameters of every run with the schedule."
    required: tuple[str, ...] = ()
    "Names of the hyperparameters without a default."
    has_length: bool = False
    """Whether the schedule reads `length`. The default over rounds is the run's number of rounds; a
    schedule over steps requires the length."""

    def __repr__(self) -> str:
        return format_entry(self)


_DECAY_BOUNDS, _FINAL = Bounds(0, 1, open_low=True), HyperParameter(0.0, Bounds(0))
_COUNT = HyperParameter(1.0, Bounds(1))
# Numbers of any schedule, where they are given. A schedule after a warm-up has the same end.
_OPTIONAL = {
    "warmup": HyperParameter(0.0, Bounds(0)),
    "warmup_from": HyperParameter(0.1, Bounds(0)),
}


def _cosine(xp: Any, t: Any, length: Any, values: Values) -> Any:
    cosine_factor = (1 + xp.cos(math.pi * xp.minimum(t / length, 1))) / 2
    return values["final"] + (1 - values["final"]) * cosine_factor


def _cosine_restarts(xp: Any, t: Any, length: Any, values: Values) -> Any:
    return _cosine(xp, t % values["every"], values["every"], values)


def _polynomial(xp: Any, t: Any, length: Any, values: Values) -> Any:
    remaining = 1 - xp.minimum(t / length, 1)
    return values["final"] + (1 - values["final"]) * remaining ** values.get("power", 1.0)


LR_SCHEDULES: Registry[LRSchedule] = Registry(
    "schedule",
    (
        LRSchedule(
            "constant",
            "a constant rate; for a warm-up before it",
            lambda xp, t, length, values: xp.ones_like(t),
        ),
        LRSchedule(
            "step",
            "times `decay` every `every` rounds or steps",
            lambda xp, t, length, values: values["decay"] ** xp.floor(t / values["every"]),
            {"decay": HyperParameter(0.1, _DECAY_BOUNDS), "every": _COUNT},
            required=("every",),
        ),
        LRSchedule(
            "exponential",
            "times `decay` each time (FedDC's and FedDyn's code: 0.998 a round)",
            lambda xp, t, length, values: values["decay"] ** t,
            {"decay": HyperParameter(0.998, _DECAY_BOUNDS)},
        ),
        LRSchedule(
            "cosine",
            "half a cosine, down to `final` (Loshchilov and Hutter, 2017)",
            _cosine,
            {"final": _FINAL},
            has_length=True,
        ),
        LRSchedule(
            "cosine_restarts",
            "half a cosine down to `final`, restarted every `every` rounds or steps",
            _cosine_restarts,
            {"final": _FINAL, "every": _COUNT},
            required=("every",),
        ),
        LRSchedule(
            "linear", "a line down to `final`", _polynomial, {"final": _FINAL}, has_length=True
        ),
        LRSchedule(
            "polynomial",
            "a power of the remaining fraction, down to `final`",
            _polynomial,
            {"final": _FINAL, "power": HyperParameter(2.0, Bounds(0, open_low=True))},
            has_length=True,
        ),
        LRSchedule(
            "inverse",
            "1 / (1 + slope t), as in convergence proofs (Li et al., 2020)",
            lambda xp, t, length, values: 1 / (1 + values["slope"] * t),
            {"slope": HyperParameter(0.01, Bounds(0))},
        ),
    ),
)
"""Schedules by name.

Example:
  >>> from fedjax_het.core.lr_schedules import LR_SCHEDULES
  >>> LR_SCHEDULES["step"].required
  ('every',)
"""


def schedule_hyperparameters(name: str, prefix: str) -> dict[str, HyperParameter]:
    """Return the hyperparameters of every run with a schedule.

    Args:
      name: name of the schedule.
      prefix: `ROUND_PREFIX` or `STEP_PREFIX`.

    Returns:
      Hyperparameters by name.

    Example:
      >>> from fedjax_het.core.lr_schedules import STEP_PREFIX, schedule_hyperparameters
      >>> list(schedule_hyperparameters("step", STEP_PREFIX))
      ['lr_step_decay', 'lr_step_every']
    """
    return {prefix + key: record for key, record in LR_SCHEDULES[name].hyperparameters.items()}


def optional_schedule_hyperparameters(name: str, prefix: str) -> dict[str, HyperParameter]:
    """Return the hyperparameters of a schedule that are used only where they are given.

    Args:
      name: name of the schedule.
      prefix: `ROUND_PREFIX` or `STEP_PREFIX`.

    Returns:
      Hyperparameters by name.
    """
    optional = _OPTIONAL | ({"length": _COUNT} if LR_SCHEDULES[name].has_length else {})
    return {prefix + key: record for key, record in optional.items()}


def required_schedule_hyperparameters(name: str, prefix: str) -> tuple[str, ...]:
    """Return the hyperparameters of a schedule without a default.

    Args:
      name: name of the schedule.
      prefix: `ROUND_PREFIX` or `STEP_PREFIX`.

    Returns:
      Their names.
    """
    schedule = LR_SCHEDULES[name]
    length = ("length",) if schedule.has_length and prefix == STEP_PREFIX else ()
    return tuple(prefix + key for key in (*schedule.required, *length))


def is_round_schedule_hyperparameter(name: str) -> bool:
    """Return whether a hyperparameter belongs to a schedule over rounds; no program reads it."""
    return name.startswith(ROUND_PREFIX) and not name.startswith(STEP_PREFIX)


def compute_round_lr_factors(name: str, hp: Mapping[str, float], rounds: int) -> np.ndarray:
    """Compute the factors of `local_lr` in each round.

    Args:
      name: name of the schedule.
      hp: values of the hyperparameters by name.
      rounds: number of rounds, R.

    Returns:
      Factors, `[R]` float32.

    Example:
      >>> from fedjax_het.core.lr_schedules import compute_round_lr_factors
      >>> compute_round_lr_factors("exponential", {"lr_decay": 0.5}, 3).tolist()
      [1.0, 0.5, 0.25]
    """
    values = {"length": float(rounds), **_select_prefix(hp, ROUND_PREFIX)}
    factors = _compute_factor(np, LR_SCHEDULES[name], np.arange(rounds, dtype=np.float64), values)
    return factors.astype(np.float32)


def make_step_lr_factor(name: str, hp: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Build the factor of `local_lr` over a client's steps.

    Args:
      name: name of the schedule.
      hp: values of the hyperparameters by name; may be traced.

    Returns:
      `factor(num_steps)` after a number of steps; may be traced.
    """
    values = _select_prefix(hp, STEP_PREFIX)

    def factor(num_steps: Any) -> Any:
        return _compute_factor(jnp, LR_SCHEDULES[name], jnp.asarray(num_steps, jnp.float32), values)

    return factor


def _select_prefix(hp: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): hp[name] for name in hp if name.startswith(prefix)}


def _compute_factor(xp: Any, schedule: LRSchedule, t: Any, values: Values) -> Any:
    """Return the factor with its warm-up.

    It is a line from `warmup_from` to 1 over the first `warmup`, then the schedule in the rest of
    its length.
    """
    length = values.get("length")
    if "warmup" not in values:
        return schedule.factor(xp, t, length, values)
    warmup = values["warmup"]
    start = values.get("warmup_from", _OPTIONAL["warmup_from"].default)
    remaining = None if length is None else xp.maximum(length - warmup, 1)
    warmup_factor = start + (1 - start) * t / xp.maximum(warmup, 1)
    factor = schedule.factor(xp, xp.maximum(t - warmup, 0), remaining, values)
    return xp.where(t < warmup, warmup_factor, factor)
