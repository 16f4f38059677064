"""Successive halving: the values of hyperparameters with the best validation accuracy.

All methods have equally many trials. The trials of the first rung run for a few rounds. Each rung
continues the best third of the trials up to three times the rounds of the rung before. A trial has
at least `AlgorithmSpec.min_rounds`, the rounds in which its method takes effect. Methods without
such a minimum have equally many rounds and local steps.

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization" (AISTATS 2016).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.runtime.progress import SweepProgressOption
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.sweep import sweep
from fedjax_het.runtime.trackers import require_trackers
from fedjax_het.tuning.search_space import (
    Space,
    draw_trials,
    fix_constants,
    get_search_space,
)
from fedjax_het.utils.config import Bounds, NonNegativeInt, PositiveInt, validate_arguments
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.io import make_output_directory, write_atomically

if TYPE_CHECKING:
    import pandas as pd

TUNING_SEED = 1000
TRIALS_FILE, CHOSEN_FILE = "tuning.csv", "tuned.json"
Sampler = Literal["halving", "optuna"]
_NumTrials = Annotated[int, Bounds(2, 10_000)]
_Reduction = Annotated[int, Bounds(2, 100)]
_Share = Annotated[float, Bounds(0, 1, open_low=True, open_high=True)]


class Budget(NamedTuple):
    """Trials and rounds of each method.

    Attributes:
      num_trials: number of trials in the first rung.
      num_rungs: number of rungs; a rung has more rounds and fewer trials than the rung before.
      reduction: factor between the rounds, and between the trials, of rungs.

    Example:
      >>> from fedjax_het.tuning.tuner import Budget
      >>> Budget(9, 3, 3).list_rungs(90)
      [(9, 10), (3, 30), (1, 90)]
    """

    num_trials: int
    num_rungs: int
    reduction: int

    def list_rungs(self, num_rounds: int, min_rounds: int = 1) -> list[tuple[int, int]]:
        """Return the number of trials and of rounds of each rung.

        Args:
          num_rounds: number of rounds of the last rung.
          min_rounds: smallest number of rounds in which the method takes effect.

        Returns:
          A pair for each rung.
        """
        pairs = []
        for rung in range(self.num_rungs):
            rounds = math.ceil(num_rounds / self.reduction ** (self.num_rungs - 1 - rung))
            rounds = min(num_rounds, max(rounds, min_rounds))
            pairs.append((math.ceil(self.num_trials / self.reduction**rung), rounds))
        return pairs

    def count_rounds(self, num_rounds: int, min_rounds: int = 1) -> int:
        """Return the number of rounds of all trials; a trial continues in the next rung."""
        total, previous_rounds = 0, 0
        for num_trials, rounds in self.list_rungs(num_rounds, min_rounds):
            total += num_trials * (rounds - previous_rounds)
            previous_rounds = rounds
        return total


DEFAULT_BUDGET = Budget(num_trials=9, num_rungs=3, reduction=3)


class TuningResult(NamedTuple):
    """Result of `tune`.

    Attributes:
      chosen: the specs with the chosen hyperparameters, in the order of the specs.
      trials: a row for each trial and rung: `method`, `spec` (number of the spec), `trial`, `rung`,
        `rounds`, the values of the hyperparameters as `hp.NAME`, `score` (mean validation accuracy
        over the seeds, missing for a diverged trial), `diverged` and `chosen`.

    Example:
      >>> from fedjax_het import RunSpec, tune
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=2)
      >>> result = tune([spec], trials=2, rungs=1, progress=None)
      >>> result.chosen[0].algorithm, result.trials["chosen"].sum().item()
      ('fedavg', 1)
    """

    chosen: list[RunSpec]
    trials: "pd.DataFrame"


@validate_arguments
def tune(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike | None = None,
    *,
    trials: _NumTrials = DEFAULT_BUDGET.num_trials,
    rungs: PositiveInt = DEFAULT_BUDGET.num_rungs,
    reduction: _Reduction = DEFAULT_BUDGET.reduction,
    seeds: Sequence[NonNegativeInt] = (TUNING_SEED,),
    validation: _Share = 0.1,
    space: Mapping[str, Any] | None = None,
    sampler: Sampler = "halving",
    progress: SweepProgressOption = "auto",
    **sweep_arguments: Any,
) -> TuningResult:
    """Choose hyperparameters of each method with equal budgets.

    A trial is a run with other hyperparameters, on seeds that no spec has, and with validation
    examples that its clients do not train on. Its score is the best validation accuracy, of the
    personal models for a personalized method. The first trial has the default values. Trials with
    equal static settings are one compiled program.

    A folder makes the search resumable: its finished trials are not repeated, and several processes
    share the work.

    Cost: `Budget.count_rounds` rounds for each spec and seed; with the default budget 2.3 times the
    rounds of a run.

    Args:
      specs: settings of each method, in which the given hyperparameters are constant.
      directory: folder of the trials (default: nothing is stored). It also receives `tuning.csv`,
        all trials, and `tuned.json`, the chosen settings.
      trials: number of trials of each spec.
      rungs: number of rungs. With 1 all trials have all rounds.
      reduction: factor between the rounds, and between the trials, of rungs.
      seeds: seeds of the trials.
      validation: fraction of each client's training examples that is withheld, for specs without
        `validation`.
      space: ranges of hyperparameters, see `get_search_space`.
      sampler: "halving", or "optuna": the sampler TPE of Optuna, whose trials have all rounds. The
        number of these trials follows from the rounds of successive halving.
      progress: see `sweep`.
      **sweep_arguments: further arguments of `sweep`, such as `dataset`, `network`, `placement`.

    Returns:
      The chosen settings and all trials.

    Raises:
      ConfigError: for settings that cannot be used, a seed that a spec has, or if all trials of a
        spec diverge.

    Example:
      >>> from fedjax_het import RunSpec, tune
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=4)
      >>> result = tune([spec], trials=3, rungs=2, progress=None)
      >>> result.trials[["trial", "rung", "rounds"]].values.tolist()
      [[0, 0, 2], [1, 0, 2], [2, 0, 2], [2, 1, 4]]
    """
    specs = [fix_constants(spec, space) for spec in specs]
    require(len(specs) > 0, "specs", specs, "at least one RunSpec")
    for spec in specs:
        expected = f"seeds other than the seed of a spec, {spec.seed}"
        require(spec.seed not in seeds, "seeds", tuple(seeds), expected)
    require(len(seeds) > 0, "seeds", tuple(seeds), "at least one seed")
    if directory is not None:
        directory = make_output_directory(directory)
    # An error precedes the first line of progress.
    require_trackers(sweep_arguments.get("track", ()), directory, argument="directory")
    runner = _TrialRunner(directory, tuple(seeds), validation, progress, sweep_arguments)
    searches = [_make_search(spec, space) for spec in specs]
    search = _search_by_optuna if sampler == "optuna" else _search_by_halving
    scored_trials = search(searches, Budget(trials, rungs, reduction), runner)
    best = [_find_best(index, spec, scored_trials) for index, spec in enumerate(specs)]
    chosen = [trial.spec for trial in best]
    table = _make_table(scored_trials, best)
    if directory is not None:
        _write_files(Path(directory), table, chosen)
    return TuningResult(chosen, table)


class _Search(NamedTuple):
    """Settings of a method, its ranges and its rounds.

    Attributes:
      spec: the settings.
      space: ranges of the hyperparameters by name.
      num_rounds: number of rounds of a run.
      min_rounds: smallest number of rounds in which the method takes effect.
    """

    spec: RunSpec
    space: Space
    num_rounds: int
    min_rounds: int


def _make_search(spec: RunSpec, space: Mapping[str, Any] | None) -> _Search:
    resolved = spec.resolved()
    method = get_algorithm_spec(resolved.algorithm, resolved.options)
    min_rounds = method.get_min_rounds(resolved.options)
    return _Search(spec, get_search_space(spec, space), resolved.rounds, min_rounds)


class _Trial(NamedTuple):
    """Hyperparameters of a method, and their score after a rung.

    Attributes:
      spec_index: number of the spec.
      number: number of the trial among the trials of the spec.
      spec: the spec with the values of the trial.
      rung: number of the rung.
      rounds: number of rounds.
      score: mean validation accuracy over the seeds; -inf if a run diverged.
    """

    spec_index: int
    number: int
    spec: RunSpec
    rung: int = 0
    rounds: int = 0
    score: float = -math.inf


class _TrialRunner(NamedTuple):
    """Arguments of `sweep` for all trials."""

    directory: Path | None
    seeds: tuple[int, ...]
    validation: float
    progress: SweepProgressOption
    sweep_arguments: Mapping[str, Any]

    def run(self, trials: Sequence[_Trial], part: str, *, keep_state: bool) -> list[_Trial]:
        """Run trials for their rounds, and return them with scores.

        Args:
          trials: the trials of a part of the search.
          part: name of this part of the search, for the progress.
          keep_state: see `sweep`.
        """
        runs = [
            replace(
                trial.spec,
                seed=seed,
                rounds=trial.rounds,
                validation=trial.spec.validation or self.validation,
            )
            for trial in trials
            for seed in self.seeds
        ]
        if callable(self.progress) or self.progress in ("auto", True):
            report = self.progress if callable(self.progress) else print
            number = f"{len(runs)} run{'s' * (len(runs) > 1)}"
            report(f"{part}: {number} up to round {max(trial.rounds for trial in trials)}")
        arguments = {"progress": self.progress, "keep_state": keep_state, **self.sweep_arguments}
        outcome = sweep(runs, self.directory, **arguments)
        if outcome.not_run:
            raise ConfigError(f"a trial cannot be run: {next(iter(outcome.not_run.values()))}")
        scores = [_get_score(result) for result in outcome.results if result is not None]
        count = len(self.seeds)
        return [
            trial._replace(score=sum(scores[i * count : (i + 1) * count]) / count)
            for i, trial in enumerate(trials)
        ]


def _get_score(result: Result) -> float:
    """Return the best validation accuracy of the models that a run evaluates."""
    spec = result.spec.resolved()
    is_personal = spec.has_client_tests and spec.evaluated_model != "global"
    name = f"best_{'client_' if is_personal else ''}validation_accuracy"
    score = result.summary[name]
    return -math.inf if result.diverged or score is None else score


def _search_by_halving(
    searches: Sequence[_Search], budget: Budget, runner: _TrialRunner
) -> list[_Trial]:
    """Return the trials of all rungs of successive halving."""
    survivors = [
        [
            _Trial(i, j, spec)
            for j, spec in enumerate(draw_trials(search.spec, search.space, budget.num_trials))
        ]
        for i, search in enumerate(searches)
    ]
    scored_trials: list[_Trial] = []
    for rung in range(budget.num_rungs):
        trials = []
        for search, own_trials in zip(searches, survivors, strict=True):
            count, rounds = budget.list_rungs(search.num_rounds, search.min_rounds)[rung]
            ranked = sorted(own_trials, key=lambda trial: -trial.score)  # stable: first trial first
            trials += [trial._replace(rung=rung, rounds=rounds) for trial in ranked[:count]]
        part = f"Rung {rung + 1} of {budget.num_rungs}"
        scored = runner.run(trials, part, keep_state=rung + 1 < budget.num_rungs)
        scored_trials += scored
        survivors = [[t for t in scored if t.spec_index == i] for i in range(len(searches))]
    return scored_trials


def _search_by_optuna(
    searches: Sequence[_Search], budget: Budget, runner: _TrialRunner
) -> list[_Trial]:
    """Return the trials of Optuna's sampler TPE, with as many rounds as successive halving.

    The sampler is seeded and its trials are run in batches, so that a search that is repeated draws
    the trials that a folder already has.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "sampler = 'optuna': expected the package optuna; pip install optuna"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scored_trials: list[_Trial] = []
    studies = [
        optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True),
        )
        for _ in searches
    ]
    num_trials = [
        max(2, round(budget.count_rounds(search.num_rounds, search.min_rounds) / search.num_rounds))
        for search in searches
    ]
    batch_starts = range(0, max(num_trials), budget.reduction)
    for number, start in enumerate(batch_starts, 1):
        batch: list[tuple[_Trial, Any]] = []
        for i, (search, study) in enumerate(zip(searches, studies, strict=True)):
            for j in range(start, min(start + budget.reduction, num_trials[i])):
                asked = study.ask()
                values = {} if j == 0 else _suggest_values(asked, search.space)
                spec = replace(search.spec, hp={**search.spec.hp, **values})
                batch.append((_Trial(i, j, spec, rounds=search.num_rounds), asked))
        part = f"Batch {number} of {len(batch_starts)}"
        scored = runner.run([trial for trial, _ in batch], part, keep_state=False)
        for trial, (_, asked) in zip(scored, batch, strict=True):
            studies[trial.spec_index].tell(asked, max(trial.score, 0.0))
        scored_trials += scored
    return scored_trials


def _suggest_values(asked: Any, space: Space) -> dict[str, float]:
    """Return the values that Optuna suggests for a trial."""
    values = {}
    for name, chosen in space.items():
        value = asked.suggest_float(name, chosen.low, chosen.high, log=chosen.is_log)
        values[name] = float(f"{value:.3g}")
    return values


def _find_best(spec_index: int, spec: RunSpec, trials: Sequence[_Trial]) -> _Trial:
    """Return the trial of a spec with the best score among the trials with the most rounds."""
    own_trials = [trial for trial in trials if trial.spec_index == spec_index]
    last_trials = [t for t in own_trials if t.rounds == max(t.rounds for t in own_trials)]
    best = max(last_trials, key=lambda trial: trial.score)
    if best.score == -math.inf:
        raise ConfigError(
            f"all trials of {spec.algorithm} diverged: expected a smaller learning rate in `space`"
        )
    return best


def _make_table(trials: Sequence[_Trial], best: Sequence[_Trial]) -> "pd.DataFrame":
    """Return the trials as a table, see `TuningResult`."""
    import pandas as pd

    records = []
    for trial in trials:
        values = {
            f"hp.{name}": value for name, value in trial.spec.resolved().hyperparameters.items()
        }
        has_diverged = trial.score == -math.inf
        record = {"method": trial.spec.algorithm, "spec": trial.spec_index, "trial": trial.number}
        record |= {"rung": trial.rung, "rounds": trial.rounds, **values}
        record |= {"score": math.nan if has_diverged else trial.score, "diverged": has_diverged}
        records.append({**record, "chosen": trial in best})
    table = pd.DataFrame(records)
    last_columns = ["score", "diverged", "chosen"]
    return table[[name for name in table if name not in last_columns] + last_columns]


def _write_files(directory: Path, table: "pd.DataFrame", chosen: Sequence[RunSpec]) -> None:
    """Write the trials and the chosen settings."""
    csv = table.to_csv(index=False).encode()
    settings = json.dumps([spec.to_dict() for spec in chosen], indent=1).encode()
    write_atomically(directory / TRIALS_FILE, lambda file: file.write(csv))
    write_atomically(directory / CHOSEN_FILE, lambda file: file.write(settings))
