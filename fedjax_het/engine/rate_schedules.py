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

from fedjax_het.common.records import Bounds, Number, above
from fedjax_het.common.registry import Registry

OVER_ROUNDS, OVER_STEPS = "lr_", "lr_step_"
Numbers = Mapping[str, Any]


class RateSchedule(NamedTuple):
    """A course of the rate, relative to what it is at most.

    factor(xp, t, length, numbers): after t rounds or steps, of `length`; in NumPy or jax.numpy.
    numbers: that it always has. required: of these, such that have no default.
    ends: whether it reads `length`. That is `lr_length`, of rounds by default those of the run,
      and over steps always to be given.
    """

    name: str
    description: str
    factor: Callable[[Any, Any, Any, Numbers], Any]
    numbers: dict[str, Number] = {}  # noqa: RUF012
    required: tuple[str, ...] = ()
    ends: bool = False


_DECAY, _FINAL = Bounds(0, 1, open_low=True), Number(0.0, Bounds(0))
_EVERY = Number(1.0, Bounds(1))
# Of every schedule, where they are given; with a warm-up it goes on behind it, until the same end.
WARMUP, WARMUP_FROM, LENGTH = "warmup", "warmup_from", "length"
_OPTIONAL = {WARMUP: Number(0.0, Bounds(0)), WARMUP_FROM: Number(0.1, Bounds(0))}
_LENGTH = Number(1.0, Bounds(1))


def _constant(xp: Any, t: Any, length: Any, numbers: Numbers) -> Any:
    return xp.ones_like(t)


def _step(xp: Any, t: Any, length: Any, numbers: Numbers) -> Any:
    return numbers["decay"] ** xp.floor(t / numbers["every"])


def _exponential(xp: Any, t: Any, length: Any, numbers: Numbers) -> Any:
    return numbers["decay"] ** t


def _cosine(xp: Any, t: Any, length: Any, numbers: Numbers) -> Any:
    fallen = (1 + xp.cos(math.pi * xp.minimum(t / length, 1))) / 2
    return numbers["final"] + (1 - numbers["final"]) * fallen


def _restarts(xp: Any, t: Any, length: Any, numbers: Numbers) -> Any:
    return _cosine(xp, t % numbers["every"], numbers["every"], numbers)


def _polynomial(xp: Any, t: Any, length: Any, numbers: Numbers) -> Any:
    left = 1 - xp.minimum(t / length, 1)
    return numbers["final"] + (1 - numbers["final"]) * left ** numbers["power"]


def _linear(xp: Any, t: Any, length: Any, numbers: Numbers) -> Any:
    return _polynomial(xp, t, length, {**numbers, "power": 1.0})


def _inverse(xp: Any, t: Any, length: Any, numbers: Numbers) -> Any:
    return 1 / (1 + numbers["slope"] * t)


SCHEDULES: Registry[RateSchedule] = Registry(
    "schedule",
    (
        RateSchedule("constant", "the same throughout; for a warm-up before it", _constant),
        RateSchedule(
            "step",
            "times `decay` after every so many",
            _step,
            {"decay": Number(0.1, _DECAY), "every": _EVERY},
            required=("every",),
        ),
        RateSchedule(
            "exponential",
            "times `decay` each time (FedDC's and FedDyn's code: 0.998 a round)",
            _exponential,
            {"decay": Number(0.998, _DECAY)},
        ),
        RateSchedule(
            "cosine",
            "half a cosine, down to `final` (Loshchilov and Hutter, 2017)",
            _cosine,
            {"final": _FINAL},
            ends=True,
        ),
        RateSchedule(
            "cosine_restarts",
            "the same again and again, begun anew after every so many",
            _restarts,
            {"final": _FINAL, "every": _EVERY},
            required=("every",),
        ),
        RateSchedule("linear", "a line down to `final`", _linear, {"final": _FINAL}, ends=True),
        RateSchedule(
            "polynomial",
            "a power of what is left, down to `final`",
            _polynomial,
            {"final": _FINAL, "power": Number(2.0, above(0))},
            ends=True,
        ),
        RateSchedule(
            "inverse",
            "1 / (1 + slope t), as convergence proofs have it (Li et al., 2020)",
            _inverse,
            {"slope": Number(0.01, Bounds(0))},
        ),
    ),
)


def schedule_numbers(name: str, prefix: str) -> dict[str, Number]:
    """The hyper-parameters that a run with this schedule always has."""
    return {prefix + each: number for each, number in SCHEDULES[name].numbers.items()}


def optional_schedule_numbers(name: str, prefix: str) -> dict[str, Number]:
    """Those that it has where they are given."""
    known = {**_OPTIONAL, **({LENGTH: _LENGTH} if SCHEDULES[name].ends else {})}
    return {prefix + each: number for each, number in known.items()}


def required_schedule_numbers(name: str, prefix: str) -> tuple[str, ...]:
    """Those that have no default: a length of rounds is the run's."""
    schedule = SCHEDULES[name]
    length = (LENGTH,) if schedule.ends and prefix == OVER_STEPS else ()
    return tuple(prefix + each for each in (*schedule.required, *length))


def is_of_host(number: str) -> bool:
    """Whether a hyper-parameter is one of a schedule over rounds, which no program reads."""
    return number.startswith(OVER_ROUNDS) and not number.startswith(OVER_STEPS)


def rate_factors(name: str, hp: Mapping[str, float], rounds: int) -> np.ndarray:
    """[rounds] float32: what `local_lr` is multiplied with in each round."""
    numbers = _of(hp, OVER_ROUNDS)
    t = np.arange(rounds, dtype=np.float64)
    return _factor(np, SCHEDULES[name], t, {LENGTH: float(rounds), **numbers}).astype(np.float32)


def step_factor(name: str, hp: Mapping[str, Any]) -> Callable[[Any], Any]:
    """-> factor(steps so far), whose numbers are traced."""
    numbers = _of(hp, OVER_STEPS)

    def factor(count: Any) -> Any:
        return _factor(jnp, SCHEDULES[name], jnp.asarray(count, jnp.float32), numbers)

    return factor


def _of(hp: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those of one prefix, without it."""
    return {name.removeprefix(prefix): hp[name] for name in hp if name.startswith(prefix)}


def _factor(xp: Any, schedule: RateSchedule, t: Any, numbers: Numbers) -> Any:
    """With its warm-up: a line from `warmup_from` to 1 over the first `warmup`, and the schedule
    behind it in what is left of its length."""
    course = partial(schedule.factor, xp)
    if WARMUP not in numbers:
        return course(t, numbers.get(LENGTH), numbers)
    warmup, begin = numbers[WARMUP], numbers.get(WARMUP_FROM, _OPTIONAL[WARMUP_FROM].default)
    length = numbers.get(LENGTH)
    left = None if length is None else xp.maximum(length - warmup, 1)
    rising = begin + (1 - begin) * t / xp.maximum(warmup, 1)
    return xp.where(t < warmup, rising, course(xp.maximum(t - warmup, 0), left, numbers))
