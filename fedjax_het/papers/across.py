"""Across papers: every method of the package under one protocol, against what it costs.

python experiments/across.py                 the embedded digits, a dozen methods
python experiments/across.py --methods all   every method
python experiments/across.py --preset cpu    Fashion-MNIST, MLP, 50 clients, 100 rounds, 3 seeds

One protocol, DynaFed's (clients, batches, local training), for all methods, at their own defaults
and untuned. All clients are tested on data like their own, so that methods with one model for all
and methods with a model for each have one score in common; the former are tested on all test
images, too. Costs are rounds, bytes both ways, and floating-point operations of clients and server
(`fedjax_het.runtime.run_flops`), of the first seed's run. The blocks of the critical-difference
diagram are clients and seeds, which are not independent where clients share a model: its p-values
are too small rather than too large.

Preset cpu, on one core of an EPYC: most methods take a minute a run, the fine-tuned averages seven,
FedDM and FedAF eleven, so that the 96 runs take three hours. FedDM and FedAF have 10 images a class
and 100 steps there: at 1,000 steps a run would take hours.
"""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import TableCell
from fedjax_het.analysis.direct_labels import LineLabel, label_line_ends
from fedjax_het.analysis.figure_style import assign_method_colors
from fedjax_het.analysis.figures.critical_difference import plot_critical_difference
from fedjax_het.analysis.figures.output import style_axes
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_mean_std,
    format_number,
    format_seed_count,
)
from fedjax_het.analysis.report import write_table_files
from fedjax_het.metrics.convergence import rolling_mean, rounds_to_reach
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.run_flops import count_flops
from fedjax_het.utils.io import read_stored_file, write_atomically

GLOBAL_METHODS = ("fedavg", "scaffold", "fedmix", "moon", "feddf", "dynafed", "feddm", "fsl")
PERSONAL_METHODS = ("ditto", "fedamp", "fedavg_ft", "separate")
WINDOW, TARGET_FRACTION = 5, 0.9  # rounds of a running mean; of the baseline's accuracy, the target
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
    settings={"local_tests": True},
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
            note="feddm and fedaf condense less than by their defaults: 10 images a class, 100 "
            "steps, 50 server epochs. pfedme's personal models step at 0.03, as they diverge in "
            "the first round at the default of 0.09. fedbn without batch norm is fedavg.",
        ),
    },
)
_REQUIREMENT_NAMES = {
    "server_data": "examples at the server",
    "proxy_data": "unlabelled examples",
    "averages": "averages of clients' examples",
}
CAPTION = (
    "Accuracies in %: means of the second half of the rounds ± deviation over seeds; all: of the "
    "global model on all test images; own: mean over clients of the model that each is scored "
    "with, on data like its own. MB and TFLOP: of a run; and up to the target, where a mean of "
    f"{WINDOW} rounds reaches {100 * TARGET_FRACTION:.0f} % of {BASELINES[GLOBAL_METRIC]}'s accuracy on all test "
    f"images, or of {BASELINES[CLIENT_METRIC]}'s on clients' own for methods that make models of their "
    "own. TFLOP counts batches filled up, and one tuning of all copies where tuned copies are "
    "scored; no tests."
)


class MethodCosts(NamedTuple):
    """A method's runs: curves [seeds, rounds], shares; costs [rounds], so far."""

    method: str
    curves: dict[str, np.ndarray]
    client_accuracies: dict[int, np.ndarray]  # by seed: [K], means of the second half of the rounds
    megabytes: np.ndarray
    teraflops: np.ndarray
    num_planned: int  # seeds

    @property
    def primary_metric(self) -> str:
        """Which curve its section is about."""
        return (
            GLOBAL_METRIC if METHODS[self.method].evaluated_models[0] == "global" else CLIENT_METRIC
        )

    def final_accuracy(self, metric: str) -> np.ndarray:
        """[seeds] %: means of the second half of the rounds, single ones of which differ much."""
        return 100 * _second_half(self.curves[metric].T).mean(0)

    def mean_curve(self, metric: str) -> np.ndarray:
        """[rounds] %, over seeds."""
        return 100 * self.curves[metric].mean(0)

    def smoothed_curve(self, metric: str) -> np.ndarray:
        """[rounds] %: `mean` over so many rounds, fewer at the beginning."""
        return rolling_mean(self.mean_curve(metric), WINDOW)


def _second_half(values: np.ndarray) -> np.ndarray:
    """Of arrays [rounds, ...]."""
    return values[len(values) // 2 :]


def collect_rows(table_run: TableRun) -> list[MethodCosts]:
    """Of the methods of which runs are made and none diverged."""
    diverged = _diverged_methods(table_run)
    rows = []
    for cell in table_run.cells:
        results = {run.seed: table_run.load_run_result(run) for run in cell.runs}
        available = {seed: result for seed, result in results.items() if result is not None}
        if available and cell.method not in diverged:
            rows.append(_make_row(table_run, cell, available))
    return rows


def missing_methods_note(table_run: TableRun, rows: Sequence[MethodCosts]) -> list[str]:
    """Methods that have none of the rows, and why, as a note."""
    diverged, methods_with_rows = _diverged_methods(table_run), {row.method for row in rows}
    names = [cell.method for cell in table_run.cells if cell.method not in methods_with_rows]
    reasons = [f"{name} ({'diverged' if name in diverged else 'not run'})" for name in names]
    return [f"Without a row: {', '.join(reasons)}."] if reasons else []


def _diverged_methods(table_run: TableRun) -> set[str]:
    results = table_run.cell_results
    diverged_digests = set(results["settings"][results["diverged"]]) if len(results) else set()
    return {
        cell.method
        for cell in table_run.cells
        if diverged_digests & {run.digest() for run in cell.runs}
    }


def _make_row(table_run: TableRun, cell: TableCell, results: dict[int, Result]) -> MethodCosts:
    metrics = {seed: result.metrics for seed, result in results.items()}
    curves = {
        name: np.stack([run_metrics[name] for run_metrics in metrics.values()])
        for name in (GLOBAL_METRIC, CLIENT_METRIC)
    }
    bytes_per_round = np.mean(
        [run_metrics["bytes_up"] + run_metrics["bytes_down"] for run_metrics in metrics.values()],
        axis=0,
    )
    return MethodCosts(
        cell.method,
        curves,
        {
            seed: _second_half(run_metrics["client_accuracy"]).mean(0)
            for seed, run_metrics in metrics.items()
        },
        bytes_per_round.cumsum() / 1e6,
        _load_teraflops(table_run, cell),
        len(cell.runs),
    )


def stack_client_accuracies(rows: Sequence[MethodCosts]) -> np.ndarray:
    """[blocks, methods], a block being a client in a seed that all methods have."""
    seeds = sorted(set.intersection(*(set(row.client_accuracies) for row in rows)))
    columns = [
        np.concatenate([row.client_accuracies[seed] for seed in seeds] or [np.zeros(0)])
        for row in rows
    ]
    return np.stack(columns, axis=1)


def _load_teraflops(table_run: TableRun, cell: TableCell) -> np.ndarray:
    """[rounds] TFLOP so far, and of tuning copies once where these are scored; of the first seed,
    counted once and kept beside the runs."""
    run = cell.runs[0]
    path = table_run.directory / "arithmetic" / f"{run.digest()}.npy"
    try:
        content = read_stored_file(path)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        flop_counts = count_flops(run)
        cumulative_flops = flop_counts.cumulative + flop_counts.tuning
        write_atomically(path, lambda file: np.save(file, cumulative_flops))
        content = path.read_bytes()
    return np.load(io.BytesIO(content), allow_pickle=False) / 1e12


def summarize_rows(rows: Sequence[MethodCosts]) -> pd.DataFrame:
    """A row per method: means and deviations of accuracies in %, ranks, costs in all and up to the
    target."""
    by_method = {row.method: row for row in rows}
    records = []
    for row in rows:
        baseline = by_method.get(BASELINES[row.primary_metric])
        client_accuracy, global_accuracy = (
            row.final_accuracy(CLIENT_METRIC),
            row.final_accuracy(GLOBAL_METRIC),
        )
        first_round = None
        if baseline is not None:
            target = TARGET_FRACTION * baseline.final_accuracy(row.primary_metric).mean()
            first_round = rounds_to_reach(row.mean_curve(row.primary_metric), target, WINDOW)
        deviations = [
            values.std(ddof=1) if len(values) > 1 else np.nan
            for values in (global_accuracy, client_accuracy)
        ]
        costs = (np.arange(1, len(row.megabytes) + 1), row.megabytes, row.teraflops)
        costs_to_target = [
            np.nan if first_round is None else float(cost[first_round - 1]) for cost in costs
        ]
        names = ("rounds_to", "megabytes_to", "teraflops_to")
        records.append(
            {
                "method": row.method,
                "personal": row.primary_metric == CLIENT_METRIC,
                "besides": describe_requirements(row.method),
                "all": global_accuracy.mean(),
                "all_std": deviations[0],
                "own": client_accuracy.mean(),
                "own_std": deviations[1],
                **dict(zip(names, costs_to_target, strict=True)),
                "megabytes": row.megabytes[-1],
                "teraflops": row.teraflops[-1],
                "seeds": len(row.client_accuracies),
                "planned": row.num_planned,
            }
        )
    table = pd.DataFrame(records)
    for name in ("all", "own"):
        table[f"{name}_rank"] = table[name].rank(ascending=False, method="min")
    return table


def describe_requirements(method: str) -> str:
    """What a method has that FedAvg has not."""
    spec = METHODS[method]
    requirements = [text for need, text in _REQUIREMENT_NAMES.items() if need in spec.required_data]
    requirements += [] if spec.trains_locally else ["uploads of made images"]
    is_personal = spec.evaluated_models[0] != "global"
    return "; ".join([*requirements, *(["a model of each client's own"] if is_personal else [])])


def make_text_table(table: pd.DataFrame, title: str, notes: tuple[str, ...]) -> TextTable:
    sections = []
    for personal, title_ in ((False, "one model for all"), (True, "models of clients' own")):
        texts = tuple(
            {
                "Method": row.method,
                "Has besides": row.besides or MISSING,
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
            for row in table[table["personal"] == personal].itertuples(index=False)
        )
        if texts:
            sections.append(TableSection(texts, title=title_, labels={"Methods with": title_}))
    values = tuple(name for name in sections[0].rows[0] if name not in ("Method", "Has besides"))
    return TextTable(title, ("Method", "Has besides"), values, tuple(sections), notes)


def plot_accuracy_vs_cost(rows: Sequence[MethodCosts], metric: str):
    """Accuracy against rounds, bytes and operations: on all test images, or on clients' own of the
    methods that make models of clients' own. In colour, with their names, the methods that are the
    best of all at some cost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    axes = ("Rounds", "Megabytes, both ways", "TFLOP, clients and server")
    colors = assign_method_colors([row.method for row in rows])
    plotted_rows = [
        row for row in rows if metric == GLOBAL_METRIC or row.primary_metric == CLIENT_METRIC
    ]
    plotted_rows = [row for row in plotted_rows if not np.isnan(row.curves[metric]).all()]
    ends = {}
    for column, (panel, label) in enumerate(zip(panels, axes, strict=True)):
        lines = {
            row.method: (_cost_axes(row)[column], row.smoothed_curve(metric))
            for row in plotted_rows
        }
        ends[panel] = _plot_panel(panel, lines, colors)
        style_axes(panel)
        panel.set_xlabel(label)
        if column:
            panel.set_xscale("log")
    title = "All test images" if metric == GLOBAL_METRIC else "Clients' own tests and models"
    panels[0].set_ylabel(f"{title}, %")
    label_line_ends(figure, ends)
    return figure


def _cost_axes(row: MethodCosts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.arange(1, len(row.megabytes) + 1), row.megabytes, row.teraflops


def pareto_methods(lines: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """Of (cost so far, accuracy), the methods that at some cost have the highest of all so far."""
    best_methods = []
    for cost in np.unique(np.concatenate([costs for costs, _ in lines.values()])):
        best_so_far = {
            name: accuracy[costs <= cost].max()
            for name, (costs, accuracy) in lines.items()
            if costs[0] <= cost
        }
        best_methods.append(max(best_so_far, key=lambda name: best_so_far[name]))
    return list(dict.fromkeys(best_methods))


def _plot_panel(panel, lines, colors) -> list[LineLabel]:
    """Draw the lines; -> the names of those in colour."""
    highlighted = pareto_methods(lines)
    for method, (costs, accuracy) in lines.items():
        is_highlighted = method in highlighted
        color, width = (colors[method], 1.8) if is_highlighted else ("#C8C8C8", 0.9)
        panel.plot(costs, accuracy, color=color, lw=width, zorder=2 + is_highlighted, label=method)
    return [LineLabel(method, lines[method][1][-1], colors[method]) for method in highlighted]


def write_outputs(table_run: TableRun) -> list[str]:
    rows = collect_rows(table_run)
    if not rows:
        print("No run is there to be shown.")
        return []
    table = summarize_rows(rows)
    reasons = [f"Not run: {reason}" for reason in dict.fromkeys(table_run.skip_reasons.values())]
    note = ACROSS.presets[table_run.preset].note
    notes = tuple(filter(None, (CAPTION, note, *missing_methods_note(table_run, rows), *reasons)))
    text = make_text_table(table, f"{table_run.title}.", notes)
    figures = {"across_all.png": plot_accuracy_vs_cost(rows, GLOBAL_METRIC)}
    if any(row.primary_metric == CLIENT_METRIC for row in rows):
        figures["across_own.png"] = plot_accuracy_vs_cost(rows, CLIENT_METRIC)
    scores = stack_client_accuracies(rows)
    if len(rows) > 2 and len(scores) > 1:
        names = [row.method for row in rows]
        title = "Clients' own tests, blocks: clients and seeds"
        figures["critical_difference.png"] = plot_critical_difference(names, scores, title)
    return write_table_files(table_run.directory, "across", text, table, figures)


main = make_table_program(ACROSS, write_outputs)
