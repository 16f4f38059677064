"""A leaderboard: every applicable method under one protocol, tuned by one rule.

Each row is tuned by `fedjax_het.tune` with one budget and runs with five seeds. The table has the
accuracy, its difference from FedAvg, the highest accuracy of a round, the accuracy of the worst
tenth of the clients, the cost up to a target accuracy, and the spread of the tuning trials. A
critical-difference diagram ranks the rows.

A user's method joins a leaderboard by one command, which tunes and runs this method alone and
prints its row beside the rows that the folder has:

    fedjax-het table leaderboard.label --import my_method.py --preset cpu --methods my_method
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import TableCell
from fedjax_het.analysis.figures.client_accuracies import plot_critical_difference
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_mean_std,
    format_number,
    format_p_value,
    format_seed_count,
)
from fedjax_het.metrics.convergence import rounds_to_reach
from fedjax_het.metrics.personal import worst_decile
from fedjax_het.papers.across import describe_requirements, load_teraflops
from fedjax_het.papers.programs import ProgramMain
from fedjax_het.papers.table import (
    Preset,
    TableArguments,
    TableDeclaration,
    TableRun,
    make_cells,
    make_table_program,
)
from fedjax_het.papers.table.cells import ALL_ROWS
from fedjax_het.papers.table.columns import correct_p_values, run_paired_test
from fedjax_het.papers.table.search import (
    choose_hyperparameters,
    describe_search,
    load_chosen,
)
from fedjax_het.runtime.results import Result
from fedjax_het.tuning.tuner import DEFAULT_BUDGET

BASELINE = "fedavg"
SEEDS = (0, 1, 2, 3, 4)
TARGET_SHARE = 0.9  # target accuracy as a share of the baseline's accuracy
NUM_RESAMPLES = 10_000
CONFIDENCE, POWER = 0.95, 0.8
ROUNDS = 50
# FedBN without normalization layers is FedAvg; FedDM and FedAF take hours with useful settings.
_OPTIONAL_METHODS = ("fedbn", "feddm", "fedaf")
GLOBAL_METHODS = tuple(
    name for name, spec in METHODS.items() if spec.has_global_model and not spec.is_personalized
)
PERSONAL_METHODS = (
    BASELINE,
    "fedprox",
    *(name for name in METHODS if name not in GLOBAL_METHODS),
)
_QUICK_METHODS = ("fedavg", "fedprox", "scaffold", "ditto", "separate")
_SHORT_CONDENSATION = {"options": {"ipc": 10, "steps": 100, "server_epochs": 50}}
_METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "dynafed": {"options": {"trajectory_rounds": 20, "num_iterations": 200}},
    # The defaults take minutes for a round on two cores.
    "fedftg": {"options": {"image_width": 16, "distill_iterations": 1}},
    "feddm": _SHORT_CONDENSATION,
    "fedaf": _SHORT_CONDENSATION,
}
# The first trials have 6 of 50 rounds, and the synthesis must be before their last round.
_SHORT_TRAJECTORY = {"trajectory_rounds": 5, "segment_length": 3, "num_iterations": 200}


def make_leaderboard(
    name: str,
    title: str,
    methods: Sequence[str],
    settings: dict[str, Any],
    alphas: tuple[float, ...] = (),
) -> TableDeclaration:
    """Declare a leaderboard.

    Args:
      name: name of the leaderboard.
      title: title of its table.
      methods: methods of its rows.
      settings: settings of all runs, such as the kind of heterogeneity.
      alphas: concentration of a Dirichlet partition; empty for other partitions.

    Returns:
      The declaration, with the presets `quick` (digits), `cpu` (a tenth of Fashion-MNIST with the
      MLP) and `cifar` (CIFAR-10 with the ConvNet).
    """
    rows = tuple(method for method in methods if method not in _OPTIONAL_METHODS)
    quick_rows = tuple(method for method in rows if method in _QUICK_METHODS)
    others = tuple(method for method in methods if method not in rows)
    quick_others = tuple(method for method in methods if method not in quick_rows)
    full: dict[str, Any] = {"rows": rows, "optional_rows": others, "seeds": SEEDS}
    return TableDeclaration(
        name=f"leaderboard-{name}",
        paper="dynafed",
        item="leaderboard",
        title=title,
        has_reported_values=False,
        protocol="standard",
        main_method=BASELINE,
        budget=DEFAULT_BUDGET,
        settings={
            **{"num_clients": 20, "client_tests": True, "local_epochs": 2, "batch_size": 32},
            **{"server_options": {"size": 100}, "eval_every": 5},
            **settings,
        },
        presets={
            "quick": Preset(
                datasets=("digits",),
                models=("mlp",),
                seeds=(0, 1, 2),
                rows=quick_rows,
                optional_rows=quick_others,
                alphas=alphas,
                settings={"rounds": 9, "eval_every": 3, "server_options": {"size": 50}},
                method_settings={"dynafed": {"options": {"trajectory_rounds": 7}}},
            ),
            "cpu": Preset(
                datasets=("fashion_mnist_tenth",),
                models=("mlp",),
                settings={"rounds": ROUNDS},
                method_settings={**_METHOD_SETTINGS, "dynafed": {"options": _SHORT_TRAJECTORY}},
                description="a tenth of Fashion-MNIST, 50 rounds",
                alphas=alphas,
                **full,
            ),
            "cifar": Preset(
                datasets=("cifar10",),
                models=("convnet",),
                settings={"rounds": 200},
                method_settings=_METHOD_SETTINGS,
                description="CIFAR-10, 200 rounds",
                alphas=alphas,
                **full,
            ),
        },
    )


def score_run(result: Result, *, on_client_tests: bool) -> dict[str, float]:
    """Return the accuracies of a run in percent.

    The rounds of `accuracy` and `worst` are the last five, or the round with the highest validation
    accuracy if the run has a validation split.

    Args:
      result: a finished run with `client_tests`.
      on_client_tests: whether the accuracy is the mean over the clients' own tests, with their
        images; otherwise it is of the global model on all test examples.

    Returns:
      `accuracy`; `highest`, the highest accuracy of a round; and `worst`, the mean accuracy of the
      worst tenth of the clients on their own tests. Missing values are NaN.
    """
    summary, metrics = result.summary, result.metrics
    final, best, best_round, curve = (
        ("final_client_accuracy", "bmta", "bmta_round", "mean_client_accuracy")
        if on_client_tests
        else ("final_accuracy", "best_accuracy", "best_round", "test_accuracy")
    )
    if result.spec.validation is None:
        accuracy, rounds = summary.get(final), slice(-5, None)
    else:
        number = summary.get(best_round) or 0  # from 1; missing if nothing was measured
        accuracy, rounds = summary.get(best), slice(max(0, number - 1), number)
    measured = [value for value in metrics[curve] if math.isfinite(value)]
    clients = metrics["client_accuracy"][rounds]  # [rounds, clients]
    clients = clients[np.isfinite(clients).any(1)]
    values = {
        "accuracy": accuracy,
        "highest": max(measured, default=None),
        "worst": worst_decile(clients.mean(0)) if len(clients) else None,
    }
    return {key: math.nan if value is None else 100 * value for key, value in values.items()}


def compare_with_baseline(scores: pd.DataFrame) -> pd.DataFrame:
    """Compare each method with the baseline, paired by seed.

    Args:
      scores: `TableRun.collect_scores` of `score_run`, with `method` in place of `row`.

    Returns:
      A row per method: means, the mean difference `gain` with its 95 % bootstrap interval `low` to
      `high`, and `p` of paired t-tests with Holm's correction over the methods.
    """
    from scipy import stats

    accuracies = scores.pivot(index="seed", columns="method", values="accuracy")
    means = scores.groupby("method", sort=False)[["highest", "worst"]].mean()
    base = accuracies.get(BASELINE, pd.Series(math.nan, index=accuracies.index))
    records = []
    for method in scores["method"].unique():
        own = accuracies[method].dropna()
        record: dict[str, Any] = {"method": method, "accuracy": own.mean(), "std": own.std()}
        record |= {**means.loc[method], "seeds": len(own), "gain": math.nan, "p": math.nan}
        record |= {"low": math.nan, "high": math.nan}
        if method != BASELINE and len(differences := (own - base).dropna()) > 1:
            record |= {"gain": differences.mean(), "p": run_paired_test(own, base, 3).p_value}
            interval = stats.bootstrap(
                (differences.to_numpy(),),
                np.mean,
                n_resamples=NUM_RESAMPLES,
                confidence_level=CONFIDENCE,
                method="percentile",
                rng=0,
            ).confidence_interval
            record |= {"low": interval.low, "high": interval.high}
        records.append(record)
    table = pd.DataFrame(records)
    return table.assign(p=correct_p_values(table["p"].to_numpy()))


def compute_detectable_difference(std: float, num_seeds: int) -> float:
    """Compute the difference that a paired t-test finds with a power of 80 %.

    Args:
      std: standard deviation of the differences over seeds.
      num_seeds: number of seeds.

    Returns:
      The difference, in the unit of `std`, at a level of 5 % without correction.

    Example:
      >>> from fedjax_het.papers.leaderboard.board import compute_detectable_difference
      >>> print(f"{compute_detectable_difference(1.0, 5):.2f}")
      1.68
    """
    from scipy import optimize, stats

    degrees = num_seeds - 1
    critical = stats.t.ppf((1 + CONFIDENCE) / 2, degrees)

    def compute_power(effect: float) -> float:
        noncentrality = effect * math.sqrt(num_seeds)
        upper = stats.nct.sf(critical, degrees, noncentrality)
        power = upper + stats.nct.cdf(-critical, degrees, noncentrality)
        return float(np.nan_to_num(power, nan=1.0))  # SciPy has NaN for very large effects

    effect = optimize.brentq(lambda effect: compute_power(effect) - POWER, 1e-3, 100.0)
    return float(effect) * std


def compute_costs(
    table_run: TableRun, scores: pd.DataFrame, *, on_client_tests: bool
) -> pd.DataFrame:
    """Compute the cost of each method up to the target accuracy.

    Args:
      table_run: the table with its runs.
      scores: `TableRun.collect_scores` of `score_run`, with `method` in place of `row`.
      on_client_tests: see `score_run`.

    Returns:
      A row per method with runs: `method`, `rounds_to`, `megabytes_to` and `teraflops_to`; missing
      if the mean curve does not reach the target.
    """
    metric = "mean_client_accuracy" if on_client_tests else "test_accuracy"
    target = TARGET_SHARE * scores.loc[scores["method"] == BASELINE, "accuracy"].mean() / 100
    records = []
    for cell in table_run.cells:
        results = [r for run in cell.runs if (r := table_run.load_run_result(run)) is not None]
        if not results:
            continue
        curve = np.mean([result.metrics[metric] for result in results], axis=0)
        reached = rounds_to_reach(curve, target, window=1)
        record: dict[str, Any] = {"method": cell.method, "rounds_to": math.nan}
        if reached is not None:
            num_bytes = [r.metrics["bytes_up"] + r.metrics["bytes_down"] for r in results]
            megabytes = np.mean(num_bytes, axis=0).cumsum() / 1e6
            record |= {"rounds_to": reached, "megabytes_to": megabytes[reached - 1]}
            record["teraflops_to"] = load_teraflops(table_run, cell)[reached - 1]
        records.append(record)
    columns = ["method", "rounds_to", "megabytes_to", "teraflops_to"]
    return pd.DataFrame(records, columns=columns)


def compute_tuning_spread(table_run: TableRun) -> dict[str, float]:
    """Return the deviation of the scores of each method's first trials, in points."""
    spreads = {}
    for record in load_chosen(table_run.directory).values():
        first = [trial["score"] for trial in record["trials"] if trial["rung"] == 0]
        known = [score for score in first if score is not None]
        spreads[record["method"]] = 100 * float(np.std(known)) if known else math.nan
    return spreads


def make_text_table(table: pd.DataFrame, title: str, notes: Sequence[str]) -> TextTable:
    """Format a leaderboard, sorted by accuracy.

    Args:
      table: columns of `compare_with_baseline` and `compute_costs`, and `spread`.
      title: title of the table.
      notes: sentences below the table.

    Returns:
      A row per method.
    """
    rows = []
    for row in table.sort_values("accuracy", ascending=False).itertuples(index=False):
        interval = f"{row.low:+.1f} to {row.high:+.1f}" if math.isfinite(row.low) else MISSING
        rows.append(
            {
                "Method": get_method_title(row.method),
                "Addition": describe_requirements(row.method) or MISSING,
                "Accuracy": format_mean_std(row.accuracy, row.std, format_spec=".1f"),
                "Over FedAvg": format_number(row.gain, "+.1f"),
                "95 %": interval,
                "p": format_p_value(row.p),
                "Highest": format_number(row.highest, ".1f"),
                "Worst tenth": format_number(row.worst, ".1f"),
                "Rounds to": format_number(row.rounds_to, ".0f"),
                "MB to": format_number(row.megabytes_to, ".3g"),
                "TFLOP to": format_number(row.teraflops_to, ".3g"),
                "Trials ±": format_number(row.spread, ".1f"),
                "Seeds": format_seed_count(row.seeds, row.planned),
            }
        )
    minor = ("Seeds", "TFLOP to", "MB to", "Addition", "Trials ±")
    return TextTable(title, ["Method"], [TableSection(rows)], tuple(notes), minor)


def make_leaderboard_program(
    declaration: TableDeclaration, *, on_client_tests: bool = False
) -> ProgramMain:
    """Make the program of a leaderboard.

    Args:
      declaration: as `make_leaderboard` returns it.
      on_client_tests: see `score_run`.

    Returns:
      `main(argv)`, which returns the exit status.
    """

    def write_outputs(table_run: TableRun) -> Sequence[str]:
        table_run = _add_kept_rows(declaration, table_run)
        scores = table_run.collect_scores(partial(score_run, on_client_tests=on_client_tests))
        if "accuracy" not in scores:
            print("There is no run to show.")
            return []
        scores = scores.rename(columns={"row": "method"})
        measured = set(scores.loc[scores["accuracy"].notna(), "method"])
        scores = scores[scores["method"].isin(measured)]
        table = compare_with_baseline(scores)
        costs = compute_costs(table_run, scores, on_client_tests=on_client_tests)
        table = table.merge(costs, on="method", how="left")
        table["spread"] = table["method"].map(compute_tuning_spread(table_run))
        planned = {cell.method: len(cell.runs) for cell in table_run.cells}
        table["planned"] = table["method"].map(planned)
        notes = _make_notes(table_run, scores, on_client_tests=on_client_tests)
        if left_out := [get_method_title(name) for name in planned if name not in measured]:
            notes.append(f"Diverged or not run: {', '.join(left_out)}.")
        text = make_text_table(table, f"{table_run.title}.", notes)
        figures = {}
        complete = scores.pivot(index="seed", columns="method", values="accuracy").dropna(axis=1)
        if complete.shape[0] >= 3 and complete.shape[1] > 2:
            names = [get_method_title(method) for method in complete]
            title = "Mean rank of accuracy, blocks: seeds"
            figure = plot_critical_difference(names, complete.to_numpy(), title)
            figures["critical_difference.png"] = figure
        return table_run.write_table("leaderboard", text, table, figures)

    return make_table_program(declaration, write_outputs)


def _add_kept_rows(declaration: TableDeclaration, table_run: TableRun) -> TableRun:
    """Return the table with the rows that were not requested, but have results in the folder."""
    if table_run.command_line_overrides or declaration.budget is None:
        return table_run
    arguments = TableArguments(table_run.preset, methods=(ALL_ROWS,))
    cells = choose_hyperparameters(
        make_cells(declaration, arguments),
        table_run.directory,
        declaration.budget,
        runs_trials=False,
    )
    requested = {cell.method for cell in table_run.cells}
    kept = set(table_run.results["settings"]) if len(table_run.results) else set()
    shown = [
        cell
        for cell in cells
        if cell.method in requested or kept & {run.digest() for run in cell.runs}
    ]
    return table_run._replace(cells=shown)


def _make_notes(table_run: TableRun, scores: pd.DataFrame, *, on_client_tests: bool) -> list[str]:
    """Return the notes below a leaderboard."""
    accuracies = scores.pivot(index="seed", columns="method", values="accuracy")
    differences = accuracies.sub(accuracies[BASELINE], axis=0).drop(columns=BASELINE)
    measured = (
        "mean over the clients' own tests"
        if on_client_tests
        else "the global model on all test examples"
    )
    has_validation = table_run.cells[0].runs[0].validation is not None
    rounds = "round with the highest validation accuracy" if has_validation else "last five rounds"
    notes = [
        f"Accuracy in %, {measured}, {rounds}, mean ± deviation over seeds. Over "
        f"FedAvg: mean difference over seeds with its 95 % bootstrap interval; p: paired t-tests with "
        f"Holm's correction over all rows. Highest: accuracy of the best round, which is chosen by "
        f"the tests. Worst tenth: clients, {rounds}. Cost: up to the first evaluation "
        f"with {100 * TARGET_SHARE:.0f} % of FedAvg's accuracy. Trials ±: deviation of the trials "
        f"before selection.",
    ]
    if (num_seeds := len(accuracies)) > 1 and len(stds := differences.std().dropna()):
        detectable = compute_detectable_difference(float(stds.median()), num_seeds)
        notes.append(
            f"{num_seeds} seeds find a difference of {detectable:.1f} points with a probability of "
            f"{100 * POWER:.0f} %, at the median deviation of the differences."
        )
    budget, num_rounds = table_run.experiment.budget, _get_rounds(table_run.cells)
    return [*notes, describe_search(budget, num_rounds)] if budget else notes


def _get_rounds(cells: Sequence[TableCell]) -> int:
    return cells[0].runs[0].resolved().rounds
