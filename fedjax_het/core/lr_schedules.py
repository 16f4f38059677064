"""Schedules of the local rate, over rounds and over a client's steps: factors of `local_lr`.

Their numbers are hyper-parameters, `lr_<number>` over rounds and `lr_step_<number>` over steps:
over rounds the host makes one factor for each, over steps they are traced. Either way a sweep over
them compiles nothing.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_het.utils.config import Bounds, HyperParameter
from fedjax_het.utils.registry import Registry

ROUND_PREFIX, STEP_PREFIX = "lr_", "lr_step_"
HyperParameterValues = Mapping[str, Any]


class LRSchedule(NamedTuple):
    """A course of the rate, relative to what it is at most.

    factor(xp, t, length, numbers): after t rounds or steps, of `length`; in NumPy or jax.numpy.
    numbers: that it always has. required: of these, such that have no default.
    ends: whether it reads `length`. That is `lr_length`, of rounds by default those of the run,
      and over steps always to be given.
    """

    name: str
    description: str
    factor: Callable[[Any, Any, Any, HyperParameterValues], Any]
    hyperparameters: dict[str, HyperParameter] = {}  # noqa: RUF012
    required: tuple[str, ...] = ()
    has_length: bool = False


_DECAY, _FINAL_FACTOR = Bounds(0, 1, open_low=True), HyperParameter(0.0, Bounds(0))
_PERIOD = HyperParameter(1.0, Bounds(1))
# Of every schedule, where they are given; with a warm-up it goes on behind it, until the same end.
WARMUP, WARMUP_FROM, LENGTH = "warmup", "warmup_from", "length"
_OPTIONAL = {WARMUP: HyperParameter(0.0, Bounds(0)), WARMUP_FROM: HyperParameter(0.1, Bounds(0))}
_LENGTH = HyperParameter(1.0, Bounds(1))


def _constant(xp: Any, t: Any, length: Any, values: HyperParameterValues) -> Any:
    return xp.ones_like(t)


def _step_decay(xp: Any, t: Any, length: Any, values: HyperParameterValues) -> Any:
    return values["decay"] ** xp.floor(t / values["every"])


def _exponential(xp: Any, t: Any, length: Any, values: HyperParameterValues) -> Any:
    return values["decay"] ** t


def _cosine(xp: Any, t: Any, length: Any, values: HyperParameterValues) -> Any:
    cosine_factor = (1 + xp.cos(math.pi * xp.minimum(t / length, 1))) / 2
    return values["final"] + (1 - values["final"]) * cosine_factor


def _cosine_restarts(xp: Any, t: Any, length: Any, values: HyperParameterValues) -> Any:
    return _cosine(xp, t % values["every"], values["every"], values)


def _polynomial(xp: Any, t: Any, length: Any, values: HyperParameterValues) -> Any:
    remaining = 1 - xp.minimum(t / length, 1)
    return values["final"] + (1 - values["final"]) * remaining ** values["power"]


def _linear(xp: Any, t: Any, length: Any, values: HyperParameterValues) -> Any:
    return _polynomial(xp, t, length, {**values, "power": 1.0})


def _inverse_time(xp: Any, t: Any, length: Any, values: HyperParameterValues) -> Any:
    return 1 / (1 + values["slope"] * t)


LR_SCHEDULES: Registry[LRSchedule] = Registry(
    "schedule",
    (
        LRSchedule("constant", "the same throughout; for a warm-up before it", _constant),
        LRSchedule(
            "step",
            "times `decay` after every so many",
            _step_decay,
            {"decay": HyperParameter(0.1, _DECAY), "every": _PERIOD},
            required=("every",),
        ),
        LRSchedule(
            "exponential",
            "times `decay` each time (FedDC's and FedDyn's code: 0.998 a round)",
            _exponential,
            {"decay": HyperParameter(0.998, _DECAY)},
        ),
        LRSchedule(
            "cosine",
            "half a cosine, down to `final` (Loshchilov and Hutter, 2017)",
            _cosine,
            {"final": _FINAL_FACTOR},
            has_length=True,
        ),
        LRSchedule(
            "cosine_restarts",
            "the same again and again, begun anew after every so many",
            _cosine_restarts,
            {"final": _FINAL_FACTOR, "every": _PERIOD},
            required=("every",),
        ),
        LRSchedule(
            "linear", "a line down to `final`", _linear, {"final": _FINAL_FACTOR}, has_length=True
        ),
        LRSchedule(
            "polynomial",
            "a power of what is left, down to `final`",
            _polynomial,
            {"final": _FINAL_FACTOR, "power": HyperParameter(2.0, Bounds(0, open_low=True))},
            has_length=True,
        ),
        LRSchedule(
            "inverse",
            "1 / (1 + slope t), as convergence proofs have it (Li et al., 2020)",
            _inverse_time,
            {"slope": HyperParameter(0.01, Bounds(0))},
        ),
    ),
)


def schedule_hyperparameters(name: str, prefix: str) -> dict[str, HyperParameter]:
    """The hyper-parameters that a run with this schedule always has."""
    return {
        prefix + suffix: hyperparameter
        for suffix, hyperparameter in LR_SCHEDULES[name].hyperparameters.items()
    }


def optional_schedule_hyperparameters(name: str, prefix: str) -> dict[str, HyperParameter]:
    """Those that it has where they are given."""
    optional = {**_OPTIONAL, **({LENGTH: _LENGTH} if LR_SCHEDULES[name].has_length else {})}
    return {prefix + suffix: hyperparameter for suffix, hyperparameter in optional.items()}


def required_schedule_hyperparameters(name: str, prefix: str) -> tuple[str, ...]:
    """Those that have no default: a length of rounds is the run's."""
    schedule = LR_SCHEDULES[name]
    length = (LENGTH,) if schedule.has_length and prefix == STEP_PREFIX else ()
    return tuple(prefix + suffix for suffix in (*schedule.required, *length))


def is_round_schedule_hyperparameter(name: str) -> bool:
    """Whether a hyper-parameter is one of a schedule over rounds, which no program reads."""
    return name.startswith(ROUND_PREFIX) and not name.startswith(STEP_PREFIX)


def compute_round_lr_factors(name: str, hp: Mapping[str, float], rounds: int) -> np.ndarray:
    """[rounds] float32: what `local_lr` is multiplied with in each round."""
    values = _select_prefix(hp, ROUND_PREFIX)
    t = np.arange(rounds, dtype=np.float64)
    return _warmed_up_factor(np, LR_SCHEDULES[name], t, {LENGTH: float(rounds), **values}).astype(
        np.float32
    )


def make_step_lr_factor(name: str, hp: Mapping[str, Any]) -> Callable[[Any], Any]:
    """-> factor(steps so far), whose numbers are traced."""
    values = _select_prefix(hp, STEP_PREFIX)

    def factor(step: Any) -> Any:
        return _warmed_up_factor(jnp, LR_SCHEDULES[name], jnp.asarray(step, jnp.float32), values)

    return factor


def _select_prefix(hp: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those of one prefix, without it."""
    return {name.removeprefix(prefix): hp[name] for name in hp if name.startswith(prefix)}


def _warmed_up_factor(xp: Any, schedule: LRSchedule, t: Any, values: HyperParameterValues) -> Any:
    """With its warm-up: a line from `warmup_from` to 1 over the first `warmup`, and the schedule
    behind it in what is left of its length."""
    factor = partial(schedule.factor, xp)
    if WARMUP not in values:
        return factor(t, values.get(LENGTH), values)
    warmup, warmup_start = values[WARMUP], values.get(WARMUP_FROM, _OPTIONAL[WARMUP_FROM].default)
    length = values.get(LENGTH)
    remaining = None if length is None else xp.maximum(length - warmup, 1)
    warmup_factor = warmup_start + (1 - warmup_start) * t / xp.maximum(warmup, 1)
    return xp.where(t < warmup, warmup_factor, factor(xp.maximum(t - warmup, 0), remaining, values))
