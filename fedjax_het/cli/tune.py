"""Command `fedjax-het tune`: hyperparameters with equal budgets for all methods."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from fedjax_het.cli.sweep import GridOptions, build_run_specs
from fedjax_het.tuning.tuner import CHOSEN_FILE, TRIALS_FILE, TUNING_SEED, Sampler, TuningResult
from fedjax_het.utils import console
from fedjax_het.utils.config import Bounds, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class TuneCommand(GridOptions):
    """Choose hyperparameters by validation accuracy, with equal budgets for all methods.

    All trials of a method run for a few rounds, and the best third continues for three times as
    many rounds. A given hyperparameter is constant; the others have the ranges that `fedjax-het
    show METHOD` prints. The output folder keeps the trials, tuning.csv and tuned.json, the chosen
    settings. Processes share a folder's trials.
    """

    seed: tyro.conf.Suppress[int] = 0
    seeds: tuple[NonNegativeInt, ...] = (TUNING_SEED,)
    """Seeds of the trials."""
    trials: Annotated[int, Bounds(2, 10_000)] = 9
    """Number of trials of each combination of the given values."""
    rungs: PositiveInt = 3
    """Number of stages with more rounds and fewer trials; the last stage has --rounds rounds."""
    reduction: Annotated[int, Bounds(2, 100)] = 3
    """Factor between the rounds, and between the numbers of trials, of two stages."""
    space: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Ranges of hyperparameters, e.g. prox_mu=0.001,1, or a constant value (default: the ranges
    of the methods)."""
    sampler: Sampler = "halving"
    """Search: halving (successive halving), or optuna, whose trials have all rounds."""
    output_dir: Path = Path("results/tuning")
    """Folder of the trials."""


def tune_command(command: TuneCommand) -> int:
    """Tune all combinations of the given values, and print the chosen hyperparameters.

    Returns:
      Exit status, 0.

    Raises:
      ConfigError: for settings that cannot be used.
    """
    from fedjax_het.tuning.tuner import tune

    console.set_output_mode(quiet=command.quiet, as_json=command.json)
    console.log_to_stderr(logging.WARNING)
    final_seed = 0 if 0 not in command.seeds else max(command.seeds) + 1
    specs = build_run_specs(replace(command, seeds=(final_seed,)))
    space = {
        name: values[0] if len(values) == 1 else values for name, values in command.space.items()
    }
    result = tune(
        specs,
        command.output_dir,
        trials=command.trials,
        rungs=command.rungs,
        reduction=command.reduction,
        seeds=command.seeds,
        space=space,
        sampler=command.sampler,
        resume_anyway=command.resume_anyway,
        track=command.track,
        data_dir=command.data_dir,
        placement=command.make_placement(),
    )
    summary = {
        "output_dir": str(command.output_dir),
        "chosen": [s.to_dict() for s in result.chosen],
    }
    console.print_summary(summary, _describe(result, command.output_dir))
    return 0


def _describe(result: TuningResult, folder: Path) -> Iterator[str]:
    """Yield the summary of a search for people."""
    best = result.trials[result.trials["chosen"]]
    for spec, score in zip(result.chosen, best.sort_values("spec")["score"], strict=True):
        values = ", ".join(f"{name} {value:g}" for name, value in spec.hyperparameters.items())
        yield f"{spec.algorithm}: {values or 'default values'} (validation {100 * score:.1f} %)"
    yield f"Trials: {folder / TRIALS_FILE}, settings: {folder / CHOSEN_FILE}"
