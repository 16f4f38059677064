"""Comparison across papers: every method of the package under one protocol, against its cost.

python experiments/across.py                 the embedded digits, a dozen methods
python experiments/across.py --methods all   every method
python experiments/across.py --preset cpu    Fashion-MNIST, MLP, 50 clients, 100 rounds, 3 seeds

The protocol of all methods is DynaFed's (clients, batches, local training), with their own defaults
and without tuning. All clients are tested on data distributed like their training data. Methods
with one model for all and methods with a model for each client therefore have a common score.
Methods with one model are tested on all test images, too. Costs are rounds, bytes both ways, and
floating-point operations of clients and server (`fedjax_het.runtime.run_flops`) in the first seed's
run. From five seeds there is a critical-difference diagram, whose blocks are seeds.

Preset cpu takes three hours for 96 runs on one core of an EPYC. Most methods take a minute a run,
the fine-tuned averages seven, FedDM and FedAF eleven. FedDM and FedAF have 10 images a class and
100 steps there: at 1,000 steps a run would take hours.
"""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import TableCell
from fedjax_het.analysis.figures.client_accuracies import plot_critical_difference
from fedjax_het.analysis.figures.style import (
    BACKGROUND_COLOR,
    add_note,
    assign_method_colors,
    darken_for_text,
    style_axes,
)
from fedjax_het.analysis.overview import BASELINE, get_method_title
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_mean_std,
    format_number,
    format_seed_count,
)
from fedjax_het.metrics.convergence import rolling_mean, rounds_to_reach
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.papers.table.columns import MIN_PAIRS
from fedjax_het.runtime.result_store import is_partial_run
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.run_flops import count_flops
from fedjax_het.utils.io import read_stored_file, write_atomically

GLOBAL_METHODS = ("fedavg", "scaffold", "fedmix", "moon", "feddf", "dynafed", "feddm", "fsl")
PERSONAL_METHODS = ("ditto", "fedamp", "fedavg_ft", "separate")
WINDOW = 5  # rounds of a running mean
TARGET_FRACTION = 0.9  # target accuracy as a fraction of the baseline's
GLOBAL_METRIC, CLIENT_METRIC = "test_accuracy", "mean_client_accuracy"
BASELINES = {GLOBAL_METRIC: "fedavg", CLIENT_METRIC: "separate"}
SHORT_CONDENSATION = {"options": {"ipc": 10, "steps": 100, "server_epochs": 50}}
SMALL_CONDENSATION = {"options": {"ipc": 5, "steps": 10, "server_epochs": 20}}
ACROSS = TableDeclaration(
    name="across",
    paper="dynafed",
    item="across",
    title="Across papers: every method under one protocol.",
    has_reported_values=False,
    settings={"client_tests": True},
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            alphas=(0.05,),
            seeds=(0, 1),
            rows=(*GLOBAL_METHODS, *PERSONAL_METHODS),
            optional_rows=tuple(METHODS),
            settings={
                "num_clients": 20,
                "rounds": 20,
                "local_epochs": 5,
                "test_per_client": 15,
                "server_options": {"size": 50},
            },
            method_settings={
                "dynafed": {"options": {"trajectory_rounds": 10, "num_iterations": 50}},
                "feddm": SMALL_CONDENSATION,
                "fedaf": SMALL_CONDENSATION,
            },
        ),
        "cpu": Preset(
            datasets=("fashion_mnist",),
            models=("mlp",),
            alphas=(0.05,),
            seeds=(0, 1, 2),
            rows=tuple(METHODS),
            settings={"num_clients": 50, "rounds": 100, "server_options": {"size": 100}},
            method_settings={
                "feddm": SHORT_CONDENSATION,
                "fedaf": SHORT_CONDENSATION,
                "pfedme": {"hp": {"personal_lr": 0.03}},
            },
            note="FedDM and FedAF condense less than by default: 10 images a class, 100 steps, 50 "
            "server epochs. pFedMe's personal_lr is 0.03, since the default of 0.09 diverges in "
            "the first round. FedBN without batch norm is FedAvg.",
        ),
    },
)
_REQUIREMENT_NAMES = {
    "server_data": "examples at the server",
    "proxy_data": "unlabeled examples",
    "averages": "averages of clients' examples",
}
# Columns that a narrow terminal leaves out, the least important column first.
_MINOR_COLUMNS = ("Seeds", "TFLOP", "MB", "TFLOP to", "MB to", "Rank (own)", "Rank", "Addition")
CAPTION = (
    "Accuracies in %: means of the second half of the rounds ± deviation over seeds. All: the "
    "global model on all test images. Own: mean over clients of each client's evaluated model, on "
    "data distributed like the client's training data. MB and TFLOP: of a run; and up to the "
    f"target, where a mean of {WINDOW} rounds reaches {100 * TARGET_FRACTION:.0f} % of "
    f"{get_method_title(BASELINES[GLOBAL_METRIC])}'s accuracy on all test images, or "
    f"{get_method_title(BASELINES[CLIENT_METRIC])}'s on clients' own for methods that make models of "
    "their own. TFLOP counts batches filled up, and one tuning of all copies where tuned copies are "
    "evaluated; no tests."
)


class MethodCosts(NamedTuple):
    """The runs of a method: accuracies and costs."""

    method: str
    curves: dict[str, np.ndarray]
    """Accuracies by metric, fractions `[seeds, rounds]`."""
    client_accuracies: dict[int, np.ndarray]
    """By seed, means over the second half of the rounds, fractions `[K]`."""
    megabytes: np.ndarray
    """Cumulative traffic in both directions, `[rounds]`."""
    teraflops: np.ndarray
    """Cumulative operations, `[rounds]`."""
    num_planned: int
    """Number of planned seeds."""

    @property
    def primary_metric(self) -> str:
        """Metric of the section that the method is in."""
        return CLIENT_METRIC if METHODS[self.method].is_personalized else GLOBAL_METRIC

    @property
    def cost_axes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rounds, megabytes and teraflops so far, `[rounds]` each."""
        return np.arange(1, len(self.megabytes) + 1), self.megabytes, self.teraflops

    def final_accuracy(self, metric: str) -> np.ndarray:
        """Return means over the second half of the rounds in percent, `[seeds]`."""
        return 100 * _second_half(self.curves[metric].T).mean(0)

    def mean_curve(self, metric: str) -> np.ndarray:
        """Return the mean over seeds in percent, `[rounds]`."""
        return 100 * self.curves[metric].mean(0)


def _second_half(values: np.ndarray) -> np.ndarray:
    return values[len(values) // 2 :]


def collect_rows(table_run: TableRun) -> list[MethodCosts]:
    """Collect the methods that have runs, none of which diverged."""
    diverged = _list_diverged_methods(table_run)
    rows = []
    for cell in table_run.cells:
        results = {run.seed: table_run.load_run_result(run) for run in cell.runs}
        available = {seed: result for seed, result in results.items() if result is not None}
        if available and cell.method not in diverged:
            rows.append(_make_row(table_run, cell, available))
    return rows


def missing_methods_note(table_run: TableRun, rows: Sequence[MethodCosts]) -> list[str]:
    """Name the methods without a row, and why.

    Args:
      table_run: the table with its runs.
      rows: rows of `collect_rows`.

    Returns:
      One note, or none.
    """
    names, results = {row.method for row in rows}, table_run.cell_results
    states = dict.fromkeys((cell.method for cell in table_run.cells), "not run")
    states |= dict.fromkeys(_list_methods(table_run, is_partial_run(results)), "ended early")
    states |= dict.fromkeys(_list_diverged_methods(table_run), "diverged")
    reasons = [
        f"{get_method_title(name)} ({state})" for name, state in states.items() if name not in names
    ]
    return [f"Without a row: {', '.join(reasons)}."] if reasons else []


def _list_diverged_methods(table_run: TableRun) -> set[str]:
    results = table_run.cell_results
    return _list_methods(table_run, results["diverged"]) if len(results) else set()


def _list_methods(table_run: TableRun, is_selected: pd.Series) -> set[str]:
    """Return the methods of the selected runs among `cell_results`."""
    results, cells = table_run.cell_results, table_run.cells
    digests = set(results["settings"][is_selected]) if len(results) else set()
    return {cell.method for cell in cells if digests & {run.digest() for run in cell.runs}}


def _make_row(table_run: TableRun, cell: TableCell, results: dict[int, Result]) -> MethodCosts:
    metrics = {seed: result.metrics for seed, result in results.items()}
    num_bytes = np.mean([run["bytes_up"] + run["bytes_down"] for run in metrics.values()], axis=0)
    return MethodCosts(
        cell.method,
        {
            name: np.stack([run[name] for run in metrics.values()])
            for name in (GLOBAL_METRIC, CLIENT_METRIC)
        },
        {seed: _second_half(run["client_accuracy"]).mean(0) for seed, run in metrics.items()},
        num_bytes.cumsum() / 1e6,
        load_teraflops(table_run, cell),
        len(cell.runs),
    )


def stack_seed_accuracies(rows: Sequence[MethodCosts]) -> np.ndarray:
    """Return means over clients `[seeds, methods]` of the seeds that all methods have."""
    seeds = sorted(set.intersection(*(set(row.client_accuracies) for row in rows)))
    means = [[row.client_accuracies[seed].mean() for row in rows] for seed in seeds]
    return np.array(means).reshape(len(seeds), len(rows))


def load_teraflops(table_run: TableRun, cell: TableCell) -> np.ndarray:
    """Load the cumulative operations of the first seed, with one tuning of evaluated copies.

    The values are counted once and stored in the folder of the runs.

    Args:
      table_run: the table with its runs.
      cell: cell of a method.

    Returns:
      TFLOP, `[rounds]`.
    """
    run = cell.runs[0]
    path = table_run.directory / "arithmetic" / f"{run.digest()}.npy"
    try:
        content = read_stored_file(path)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        counts = count_flops(run)
        flops = counts.cumulative + counts.tuning
        write_atomically(path, lambda file: np.save(file, flops))
        content = path.read_bytes()
    return np.load(io.BytesIO(content), allow_pickle=False) / 1e12


def summarize_rows(rows: Sequence[MethodCosts]) -> pd.DataFrame:
    """Return a row per method: accuracies in percent, ranks, costs in all and up to the target."""
    by_method = {row.method: row for row in rows}
    records = []
    for row in rows:
        record: dict[str, Any] = {
            "method": row.method,
            "personal": row.primary_metric == CLIENT_METRIC,
            "besides": describe_requirements(row.method),
        }
        for name, metric in (("all", GLOBAL_METRIC), ("own", CLIENT_METRIC)):
            accuracies = row.final_accuracy(metric)
            record[name] = accuracies.mean()
            record[f"{name}_std"] = accuracies.std(ddof=1) if len(accuracies) > 1 else np.nan
        baseline, first_round = by_method.get(BASELINES[row.primary_metric]), None
        if baseline is not None:
            target = TARGET_FRACTION * baseline.final_accuracy(row.primary_metric).mean()
            first_round = rounds_to_reach(row.mean_curve(row.primary_metric), target, WINDOW)
        names = ("rounds_to", "megabytes_to", "teraflops_to")
        for name, cost in zip(names, row.cost_axes, strict=True):
            record[name] = np.nan if first_round is None else float(cost[first_round - 1])
        record |= {"megabytes": row.megabytes[-1], "teraflops": row.teraflops[-1]}
        record |= {"seeds": len(row.client_accuracies), "planned": row.num_planned}
        records.append(record)
    table = pd.DataFrame(records)
    for name in ("all", "own"):
        table[f"{name}_rank"] = table[name].rank(ascending=False, method="min")
    return table


def describe_requirements(method: str) -> str:
    """Describe the differences of a method from FedAvg."""
    spec = METHODS[method]
    requirements = [text for need, text in _REQUIREMENT_NAMES.items() if need in spec.required_data]
    requirements += [] if spec.trains_locally else ["uploads of synthetic images"]
    requirements += ["a model of each client's own"] if spec.is_personalized else []
    return "; ".join(requirements)


def make_text_table(table: pd.DataFrame, title: str, notes: tuple[str, ...]) -> TextTable:
    """Format the summary of `summarize_rows`.

    Args:
      table: the summary.
      title: title of the table.
      notes: sentences below the table.

    Returns:
      A section for methods with one model, and one for methods with a model per client.
    """
    sections = []
    for is_personal, name in ((False, "one model for all"), (True, "models of clients' own")):
        texts = [
            {
                "Method": get_method_title(row.method),
                "Addition": row.besides or MISSING,
                "All": format_mean_std(row.all, row.all_std, format_spec=".1f"),
                "Rank": format_number(row.all_rank, ".0f"),
                "Own": format_mean_std(row.own, row.own_std, format_spec=".1f"),
                "Rank (own)": format_number(row.own_rank, ".0f"),
                "Rounds to": format_number(row.rounds_to, ".0f"),
                "MB to": format_number(row.megabytes_to, ".3g"),
                "TFLOP to": format_number(row.teraflops_to, ".3g"),
                "MB": format_number(row.megabytes, ".3g"),
                "TFLOP": format_number(row.teraflops, ".3g"),
                "Seeds": format_seed_count(row.seeds, row.planned),
            }
            for row in table[table["personal"] == is_personal].itertuples(index=False)
        ]
        if texts:
            sections.append(TableSection(texts, name, {"Methods with": name}))
    return TextTable(title, ["Method", "Addition"], sections, notes, _MINOR_COLUMNS)


def plot_accuracy_vs_cost(rows: Sequence[MethodCosts], metric: str):
    """Plot accuracy against rounds, bytes and operations.

    There is a column of panels for each method with the best accuracy at some cost. FedAvg is
    dashed in all panels, and the other methods with a column are gray.

    Args:
      rows: the methods.
      metric: `GLOBAL_METRIC`: all methods on all test images; `CLIENT_METRIC`: methods with a model
        per client on the clients' own tests.

    Returns:
      A figure with a row of panels per cost.
    """
    from matplotlib.figure import Figure

    curves = {
        row.method: (row.cost_axes, rolling_mean(row.mean_curve(metric), WINDOW))
        for row in rows
        if (metric in (GLOBAL_METRIC, row.primary_metric) or row.method == BASELINE)
        and not np.isnan(row.curves[metric]).all()
    }
    axis_labels = ("Rounds", "Megabytes", "TFLOP")
    lines_by_cost = [
        {method: (costs[index], accuracy) for method, (costs, accuracy) in curves.items()}
        for index in range(len(axis_labels))
    ]
    best = [name for lines in lines_by_cost for name in pareto_methods(lines)]
    shown = [name for name in dict.fromkeys(best) if name != BASELINE] or [BASELINE]
    colors = assign_method_colors([*shown, BASELINE])
    figure = Figure(figsize=(1.45 * len(shown) + 0.9, 4.6), layout="constrained")
    grid = figure.subplots(len(axis_labels), len(shown), squeeze=False, sharex="row", sharey=True)
    for lines, axis_label, panels in zip(lines_by_cost, axis_labels, grid, strict=True):
        for method, panel in zip(shown, panels, strict=True):
            for name in (name for name in shown if name != method):
                panel.plot(*lines[name], color=BACKGROUND_COLOR, lw=0.7, label="_behind")
            if BASELINE in lines:
                panel.plot(*lines[BASELINE], "--", color=colors[BASELINE], lw=1.2, label=BASELINE)
                style: Any = {"color": darken_for_text(colors[BASELINE]), "fontsize": 7}
                name, corner = get_method_title(BASELINE), (0.97, 0.04)
                panel.annotate(name, corner, xycoords="axes fraction", ha="right", **style)
            panel.plot(*lines[method], color=colors[method], lw=1.8, label=method)
            style_axes(panel)
            panel.set_xlabel(axis_label, fontsize=8)
            panel.tick_params(labelsize=7)
            panel.set_xscale("linear" if axis_label == "Rounds" else "log")
    for method, panel in zip(shown, grid[0], strict=True):
        color = darken_for_text(colors[method])
        panel.set_title(get_method_title(method), fontsize=9, fontweight="bold", color=color)
    is_global = metric == GLOBAL_METRIC
    title = "Test accuracy (%)" if is_global else "Accuracy of clients' own models (%)"
    figure.supylabel(title, fontsize=9)
    add_note(
        figure,
        f"Pareto-optimal methods, out of {len(curves)}; gray: the other columns; "
        f"lines: running means over {WINDOW} rounds, mean over seeds; megabytes: both ways; TFLOP: "
        "clients and server",
    )
    return figure


def pareto_methods(lines: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """Return the methods that have, at some cost, the highest accuracy so far.

    Args:
      lines: by method, costs so far and accuracies, `[rounds]` each.
    """
    best_methods = []
    for limit in np.unique(np.concatenate([cost for cost, _ in lines.values()])):
        best_so_far = {
            name: accuracy[cost <= limit].max()
            for name, (cost, accuracy) in lines.items()
            if cost[0] <= limit
        }
        best_methods.append(max(best_so_far, key=lambda name: best_so_far[name]))
    return list(dict.fromkeys(best_methods))


def _write_outputs(table_run: TableRun) -> list[str]:
    rows = collect_rows(table_run)
    if not rows:
        print("There is no run to show.")
        return []
    table = summarize_rows(rows)
    reasons = [f"Not run: {reason}" for reason in dict.fromkeys(table_run.skip_reasons.values())]
    note = ACROSS.presets[table_run.preset].note
    notes = tuple(filter(None, (CAPTION, note, *missing_methods_note(table_run, rows), *reasons)))
    text = make_text_table(table, f"{table_run.title}.", notes)
    figures = {"across_all.png": plot_accuracy_vs_cost(rows, GLOBAL_METRIC)}
    if any(row.primary_metric == CLIENT_METRIC for row in rows):
        figures["across_own.png"] = plot_accuracy_vs_cost(rows, CLIENT_METRIC)
    scores = stack_seed_accuracies(rows)
    if len(rows) > 2 and len(scores) >= MIN_PAIRS:
        names = [get_method_title(row.method) for row in rows]
        title = "Mean over clients of their own tests, blocks: seeds"
        figures["critical_difference.png"] = plot_critical_difference(names, scores, title)
    return table_run.write_table("across", text, table, figures)


main = make_table_program(ACROSS, _write_outputs)
