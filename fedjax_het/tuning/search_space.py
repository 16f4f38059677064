"""Ranges of the hyperparameters that a search varies, and trials in these ranges."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.config.resolve import supported_hyperparameters
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.optimizers import LR_NAME
from fedjax_het.utils.config import HyperParameter, SearchRange
from fedjax_het.utils.errors import require

LR_FACTOR = 10.0
"""Range of the clients' learning rate: from the default divided by this number to its product."""

Space = Mapping[str, SearchRange]


def get_search_space(
    spec: RunSpec, space: Mapping[str, Any] | None = None
) -> dict[str, SearchRange]:
    """Return the hyperparameters that a search varies, with their ranges.

    They are the clients' learning rate, within a factor of ten around its default, and the
    hyperparameters for which the method declares a range. Hyperparameters with a value in the
    settings are not varied.

    Args:
      spec: settings of the runs.
      space: other ranges by name, as `SearchRange` or (low, high), or a number for a constant
        value, see `fix_constants`. Names that the method does not have are ignored.

    Returns:
      Ranges by name, in the order of the method's hyperparameters.

    Raises:
      ConfigError: if a range has no interval of valid values.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.tuning import get_search_space
      >>> spec = RunSpec("fedprox", "digits", learning_rate=0.1)
      >>> {name: str(values) for name, values in get_search_space(spec).items()}
      {'prox_mu': '0.001 to 1'}
    """
    resolved = spec.resolved()
    method = get_algorithm_spec(resolved.algorithm, resolved.options)
    records = method.collect_hyperparameters(
        resolved.local_optimizer, resolved.options, resolved.num_clients
    )
    ranges = {}
    for name, record in records.items():
        if name in spec.hyperparameters:
            continue
        if space is not None and name in space:
            ranges[name] = _to_range(name, space[name], record)
        elif record.search_range is not None:
            ranges[name] = record.search_range
        elif name == LR_NAME:
            default = resolved.hyperparameters[name]
            ranges[name] = SearchRange(default / LR_FACTOR, default * LR_FACTOR)
    return ranges


def _to_range(name: str, value: Any, record: HyperParameter) -> SearchRange:
    """Return a range of the user, which must be valid."""
    argument = f"space[{name!r}]"
    expected = "a number, or (low, high) with 0 < low < high"
    try:
        chosen = SearchRange(*value)
        is_valid = chosen.low < chosen.high and (chosen.low > 0 or not chosen.is_log)
    except TypeError:
        is_valid = False
    require(is_valid, argument, value, expected)
    has_valid_limits = record.bounds.contains(chosen.low) and record.bounds.contains(chosen.high)
    require(has_valid_limits, argument, value, f"limits {record.bounds}")
    return chosen


def fix_constants(spec: RunSpec, space: Mapping[str, Any] | None) -> RunSpec:
    """Return settings with the hyperparameters for which `space` has a number.

    Args:
      spec: settings of the runs; their hyperparameters take precedence.
      space: see `get_search_space`.

    Returns:
      The settings.
    """
    constants = {n: float(v) for n, v in (space or {}).items() if isinstance(v, int | float)}
    names = supported_hyperparameters(spec, constants)
    added = {name: constants[name] for name in names if name not in spec.hyperparameters}
    return replace(spec, hp={**spec.hp, **added})


def draw_trials(spec: RunSpec, space: Space, num_trials: int) -> list[RunSpec]:
    """Return runs with values that cover the ranges evenly.

    The first run has the default values. The others are points of a scrambled Sobol sequence, which
    depends on the number of hyperparameters alone.

    Args:
      spec: settings of the runs.
      space: ranges by name.
      num_trials: number of runs.

    Returns:
      The runs, without repetitions; one run without ranges.
    """
    from scipy.stats import qmc

    trials = [spec]
    if space:
        sequence = qmc.Sobol(len(space), rng=0).random_base2((num_trials - 1).bit_length())
        for point in sequence[: num_trials - 1]:
            pairs = zip(space.items(), point, strict=True)
            values = {name: chosen.interpolate(float(share)) for (name, chosen), share in pairs}
            trials.append(replace(spec, hp={**spec.hp, **values}))
    return list({trial.digest(): trial for trial in trials}.values())
