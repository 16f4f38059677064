"""Across papers: every method of the package under one protocol, against what it costs.

python experiments/across.py                 the embedded digits, a dozen methods
python experiments/across.py --methods all   every method
python experiments/across.py --preset cpu    Fashion-MNIST, MLP, 50 clients, 100 rounds, 3 seeds

One protocol, DynaFed's (clients, batches, local training), for all methods, at their own defaults
and untuned. All clients are tested on data like their own, so that methods with one model for all
and methods with a model for each have one score in common; the former are tested on all test
images, too. Costs are rounds, bytes both ways, and floating-point operations of clients and server
(`fedjax_het.running.arithmetic`), of the first seed's run. The blocks of the critical-difference
diagram are clients and seeds, which are not independent where clients share a model: its p-values
are too small rather than too large.

Preset cpu, on one core of an EPYC: most methods take a minute a run, the fine-tuned averages seven,
FedDM and FedAF eleven, so that the 96 runs take three hours. FedDM and FedAF have 10 images a class
and 100 steps there: at 1,000 steps a run would take hours.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_het.algorithms import METHODS
from fedjax_het.common.files import write_atomically
from fedjax_het.common.pictures import plain_axes
from fedjax_het.measures.convergence import rolling_mean, rounds_to
from fedjax_het.report.cell import Cell
from fedjax_het.report.critical_difference import plot_critical_difference
from fedjax_het.report.line_ends import End, name_ends
from fedjax_het.report.paper_table import Experiment, Outcome, Preset, program
from fedjax_het.report.render import (
    MISSING,
    Section,
    TextTable,
    number_text,
    plus_minus,
    seeds_text,
)
from fedjax_het.report.style import method_colours
from fedjax_het.report.write import publish
from fedjax_het.running.arithmetic import count
from fedjax_het.running.result import Result

FEW = ("fedavg", "scaffold", "fedmix", "moon", "feddf", "dynafed", "feddm", "fsl")
OWN = ("ditto", "fedamp", "fedavg_ft", "separate")
WINDOW, SHARE = 5, 0.9  # rounds of a running mean; of the baseline's accuracy, the target
GLOBAL, CLIENTS = "test_accuracy", "mean_client_accuracy"
BASELINES = {GLOBAL: "fedavg", CLIENTS: "separate"}
SHORT = {"options": {"ipc": 10, "steps": 100, "server_epochs": 50}}
SMALL = {"options": {"ipc": 5, "steps": 10, "server_epochs": 20}}
ACROSS = Experiment(
    name="across",
    paper="dynafed",
    item="across",
    title="Across papers: every method under one protocol.",
    reported=False,
    settings={"local_tests": True},
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            alphas=(0.05,),
            seeds=(0, 1),
            rows=(*FEW, *OWN),
            more_rows=tuple(METHODS),
            settings={
                "num_clients": 20,
                "rounds": 20,
                "local_epochs": 5,
                "test_per_client": 15,
                "server_options": {"size": 50},
            },
            method_settings={
                "dynafed": {"options": {"trajectory_rounds": 10, "num_iterations": 50}},
                "feddm": SMALL,
                "fedaf": SMALL,
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
                "feddm": SHORT,
                "fedaf": SHORT,
                "pfedme": {"hp": {"personal_lr": 0.03}},
            },
            note="feddm and fedaf condense less than by their defaults: 10 images a class, 100 "
            "steps, 50 server epochs. pfedme's personal models step at 0.03, as they diverge in "
            "the first round at the default of 0.09. fedbn without batch norm is fedavg.",
        ),
    },
)
_EXTRAS = {
    "server_data": "examples at the server",
    "proxy_data": "unlabelled examples",
    "averages": "averages of clients' examples",
}
CAPTION = (
    "Accuracies in %: means of the second half of the rounds ± deviation over seeds; all: of the "
    "global model on all test images; own: mean over clients of the model that each is scored "
    "with, on data like its own. MB and TFLOP: of a run; and up to the target, where a mean of "
    f"{WINDOW} rounds reaches {100 * SHARE:.0f} % of {BASELINES[GLOBAL]}'s accuracy on all test "
    f"images, or of {BASELINES[CLIENTS]}'s on clients' own for methods that make models of their "
    "own. TFLOP counts batches filled up, and one tuning of all copies where tuned copies are "
    "scored; no tests."
)


class Row(NamedTuple):
    """A method's runs: curves [seeds, rounds], shares; costs [rounds], so far."""

    method: str
    curves: dict[str, np.ndarray]
    clients: dict[int, np.ndarray]  # by seed: [K], means of the second half of the rounds
    megabytes: np.ndarray
    teraflops: np.ndarray
    planned: int  # seeds

    @property
    def kind(self) -> str:
        """Which curve its section is about."""
        return GLOBAL if METHODS[self.method].scored[0] == "global" else CLIENTS

    def final(self, name: str) -> np.ndarray:
        """[seeds] %: means of the second half of the rounds, single ones of which differ much."""
        return 100 * _second_half(self.curves[name].T).mean(0)

    def mean(self, name: str) -> np.ndarray:
        """[rounds] %, over seeds."""
        return 100 * self.curves[name].mean(0)

    def smoothed(self, name: str) -> np.ndarray:
        """[rounds] %: `mean` over so many rounds, fewer at the beginning."""
        return rolling_mean(self.mean(name), WINDOW)


def _second_half(rounds: np.ndarray) -> np.ndarray:
    """Of arrays [rounds, ...]."""
    return rounds[len(rounds) // 2 :]


def rows_of(outcome: Outcome) -> list[Row]:
    """Of the methods of which runs are made and none diverged."""
    lost = _diverged(outcome)
    rows = []
    for cell in outcome.cells:
        found = {run.seed: outcome.result_of(run) for run in cell.runs}
        made = {seed: result for seed, result in found.items() if result is not None}
        if made and cell.method not in lost:
            rows.append(_row(outcome, cell, made))
    return rows


def left_out(outcome: Outcome, rows: Sequence[Row]) -> list[str]:
    """Methods that have none of the rows, and why, as a note."""
    lost, there = _diverged(outcome), {row.method for row in rows}
    names = [cell.method for cell in outcome.cells if cell.method not in there]
    why = [f"{name} ({'diverged' if name in lost else 'not run'})" for name in names]
    return [f"Without a row: {', '.join(why)}."] if why else []


def _diverged(outcome: Outcome) -> set[str]:
    results = outcome.own_results
    lost = set(results["settings"][results["diverged"]]) if len(results) else set()
    return {cell.method for cell in outcome.cells if lost & {run.digest() for run in cell.runs}}


def _row(outcome: Outcome, cell: Cell, results: dict[int, Result]) -> Row:
    metrics = {seed: result.metrics for seed, result in results.items()}
    curves = {name: np.stack([one[name] for one in metrics.values()]) for name in (GLOBAL, CLIENTS)}
    sent = np.mean([one["bytes_up"] + one["bytes_down"] for one in metrics.values()], axis=0)
    return Row(
        cell.method,
        curves,
        {seed: _second_half(one["client_accuracy"]).mean(0) for seed, one in metrics.items()},
        sent.cumsum() / 1e6,
        _flops(outcome, cell),
        len(cell.runs),
    )


def client_scores(rows: Sequence[Row]) -> np.ndarray:
    """[blocks, methods], a block being a client in a seed that all methods have."""
    seeds = sorted(set.intersection(*(set(row.clients) for row in rows)))
    columns = [
        np.concatenate([row.clients[seed] for seed in seeds] or [np.zeros(0)]) for row in rows
    ]
    return np.stack(columns, axis=1)


def _flops(outcome: Outcome, cell: Cell) -> np.ndarray:
    """[rounds] TFLOP so far, and of tuning copies once where these are scored; of the first seed,
    counted once and kept beside the runs."""
    run = cell.runs[0]
    path = outcome.directory / "arithmetic" / f"{run.digest()}.npy"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        counted = count(run)
        found = counted.so_far + counted.tuning
        write_atomically(path, lambda file: np.save(file, found))
    return np.load(path, allow_pickle=False) / 1e12


def numbers(rows: Sequence[Row]) -> pd.DataFrame:
    """A row per method: means and deviations of accuracies in %, ranks, costs in all and up to the
    target."""
    by_method = {row.method: row for row in rows}
    made = []
    for row in rows:
        base = by_method.get(BASELINES[row.kind])
        own, all_ = row.final(CLIENTS), row.final(GLOBAL)
        first = None
        if base is not None:
            target = SHARE * base.final(row.kind).mean()
            first = rounds_to(row.mean(row.kind), target, WINDOW)
        deviations = [values.std(ddof=1) if len(values) > 1 else np.nan for values in (all_, own)]
        costs = (np.arange(1, len(row.megabytes) + 1), row.megabytes, row.teraflops)
        to = [np.nan if first is None else float(cost[first - 1]) for cost in costs]
        names = ("rounds_to", "megabytes_to", "teraflops_to")
        made.append(
            {
                "method": row.method,
                "personal": row.kind == CLIENTS,
                "besides": besides(row.method),
                "all": all_.mean(),
                "all_std": deviations[0],
                "own": own.mean(),
                "own_std": deviations[1],
                **dict(zip(names, to, strict=True)),
                "megabytes": row.megabytes[-1],
                "teraflops": row.teraflops[-1],
                "seeds": len(row.clients),
                "planned": row.planned,
            }
        )
    table = pd.DataFrame(made)
    for name in ("all", "own"):
        table[f"{name}_rank"] = table[name].rank(ascending=False, method="min")
    return table


def besides(method: str) -> str:
    """What a method has that FedAvg has not."""
    entry = METHODS[method]
    found = [text for need, text in _EXTRAS.items() if need in entry.needs]
    found += [] if entry.trains_locally else ["uploads of made images"]
    kept = entry.scored[0] != "global"
    return "; ".join([*found, *(["a model of each client's own"] if kept else [])])


def text_table(table: pd.DataFrame, title: str, notes: tuple[str, ...]) -> TextTable:
    sections = []
    for personal, title_ in ((False, "one model for all"), (True, "models of clients' own")):
        texts = tuple(
            {
                "Method": row.method,
                "Has besides": row.besides or MISSING,
                "All": plus_minus(row.all, row.all_std, form=".1f"),
                "Rank": number_text(row.all_rank, ".0f"),
                "Own": plus_minus(row.own, row.own_std, form=".1f"),
                "Rank (own)": number_text(row.own_rank, ".0f"),
                "Rounds to": number_text(row.rounds_to, ".0f"),
                "MB to": number_text(row.megabytes_to, ".3g"),
                "TFLOP to": number_text(row.teraflops_to, ".3g"),
                "MB": number_text(row.megabytes, ".3g"),
                "TFLOP": number_text(row.teraflops, ".3g"),
                "Seeds": seeds_text(row.seeds, row.planned),
            }
            for row in table[table["personal"] == personal].itertuples(index=False)
        )
        if texts:
            sections.append(Section(texts, title=title_, labels={"Methods with": title_}))
    values = tuple(name for name in sections[0].rows[0] if name not in ("Method", "Has besides"))
    return TextTable(title, ("Method", "Has besides"), values, tuple(sections), notes)


def draw(rows: Sequence[Row], score: str):
    """Accuracy against rounds, bytes and operations: on all test images, or on clients' own of the
    methods that make models of clients' own. In colour, with their names, the methods that are the
    best of all at some cost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    axes = ("Rounds", "Megabytes, both ways", "TFLOP, clients and server")
    colours = method_colours([row.method for row in rows])
    there = [row for row in rows if score == GLOBAL or row.kind == CLIENTS]
    there = [row for row in there if not np.isnan(row.curves[score]).all()]
    ends = {}
    for column, (panel, label) in enumerate(zip(panels, axes, strict=True)):
        lines = {row.method: (_costs(row)[column], row.smoothed(score)) for row in there}
        ends[panel] = _panel(panel, lines, colours)
        plain_axes(panel)
        panel.set_xlabel(label)
        if column:
            panel.set_xscale("log")
    title = "All test images" if score == GLOBAL else "Clients' own tests and models"
    panels[0].set_ylabel(f"{title}, %")
    name_ends(figure, ends)
    return figure


def _costs(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.arange(1, len(row.megabytes) + 1), row.megabytes, row.teraflops


def best_at_some_cost(lines: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """Of (cost so far, accuracy), the methods that at some cost have the highest of all so far."""
    found = []
    for cost in np.unique(np.concatenate([costs for costs, _ in lines.values()])):
        reached = {
            name: accuracy[costs <= cost].max()
            for name, (costs, accuracy) in lines.items()
            if costs[0] <= cost
        }
        found.append(max(reached, key=lambda name: reached[name]))
    return list(dict.fromkeys(found))


def _panel(panel, lines, colours) -> list[End]:
    """Draw the lines; -> the names of those in colour."""
    front = best_at_some_cost(lines)
    for method, (costs, accuracy) in lines.items():
        named = method in front
        colour, width = (colours[method], 1.8) if named else ("#C8C8C8", 0.9)
        panel.plot(costs, accuracy, color=colour, lw=width, zorder=2 + named, label=method)
    return [End(method, lines[method][1][-1], colours[method]) for method in front]


def write(outcome: Outcome) -> list[str]:
    rows = rows_of(outcome)
    if not rows:
        print("No run is there to be shown.")
        return []
    table = numbers(rows)
    reasons = [f"Not run: {reason}" for reason in dict.fromkeys(outcome.not_run.values())]
    note = ACROSS.presets[outcome.preset].note
    notes = tuple(filter(None, (CAPTION, note, *left_out(outcome, rows), *reasons)))
    text = text_table(table, f"{outcome.title}.", notes)
    figures = {"across_all.png": draw(rows, GLOBAL)}
    if any(row.kind == CLIENTS for row in rows):
        figures["across_own.png"] = draw(rows, CLIENTS)
    scores = client_scores(rows)
    if len(rows) > 2 and len(scores) > 1:
        names = [row.method for row in rows]
        title = "Clients' own tests, blocks: clients and seeds"
        figures["critical_difference.png"] = plot_critical_difference(names, scores, title)
    return publish(outcome.directory, "across", text, table, figures)


main = program(ACROSS, write)

if __name__ == "__main__":
    raise SystemExit(main())
