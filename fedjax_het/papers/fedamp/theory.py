"""FedAMP's Theorems 1 and 2: the objective G(W) and its gradient along runs.

python experiments/fedamp/theory.py                  the embedded digits, a minute on 2 cores
python experiments/fedamp/theory.py --preset short   Fashion-MNIST: half an hour

The theorems bound min_k G(W^k) - G* where G is convex and min_k ||grad G(W^k)||^2 where it is
smooth, after K rounds with alpha_k = lambda / sqrt(K), by constants over sqrt(K). The constants
(B, L, G*) are not known; drawn beside the runs (`theory.png`) is that rate through the first
value. A row for each K, in the absolute scale, in which G does not change from round to round, with
a linear network, whose losses F are convex (the attention A is not), and with the usual one; runs
have a round more than K, before which W^K is measured. Clients approximate Eq. 6 by their epochs of
SGD, where the theorems have a step of their own for it.
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from fedjax_het.analysis.figure_style import add_legend, make_panels
from fedjax_het.analysis.figures.output import style_axes
from fedjax_het.analysis.render import TableSection, TextTable, format_number
from fedjax_het.analysis.report import write_table_files
from fedjax_het.papers.fedamp.table3 import TABLE3
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.papers.table.declaration import parse_row_any_dataset

ROUNDS = (4, 16, 64, 256)
PROX_LAMBDA = 1.0  # lambda
SIGMA = 10.0
HIDDEN_WIDTH = 128
NETWORKS_BY_DEPTH = {0: "linear", 2: "two hidden layers"}  # by the number of layers
NETWORK_COLORS = {"linear": "#0072B2", "two hidden layers": "#D55E00"}
RATE_LABELS = {"objective": "rate of G", "gradient": "of gradient²"}
CAPTION = (
    f"lambda {PROX_LAMBDA:g}, sigma {SIGMA:g}, alpha lambda / sqrt(K). Start: at W^0. Lowest: of W^0 "
    "to W^K. Rate: the slope of the lowest over K in logarithms; the theorems bound what is above "
    "G*, which is 0 or more, and the gradient's square by constants times K^-0.5. Means over seeds."
)


def make_rows() -> tuple[str, ...]:
    return tuple(f"fedamp(layers={layers}, K={K})" for layers in NETWORKS_BY_DEPTH for K in ROUNDS)


def read_row(row: str, dataset: str):
    method, variant = parse_row_any_dataset(row, dataset)
    rounds = variant.pop("K")
    return method, {
        "network_options": {"hidden": [HIDDEN_WIDTH] * variant.pop("layers")},
        "rounds": rounds + 1,
        "gradient_gaps": 1,
        "local_epochs": 5,
        "scale": "absolute",
        "hp": {
            "sigma": SIGMA,
            "prox_lambda": PROX_LAMBDA,
            "alpha": PROX_LAMBDA / math.sqrt(rounds),
            "local_lr": 0.03,  # times the strongest pull, sqrt(256), it is stable
        },
    }


THEORY = replace(
    TABLE3,
    name="fedamp-theory",
    results_folder="",
    title="FedAMP, Theorems 1 and 2: the objective and its gradient.",
    has_reported_values=False,
    main_method="",
    tuned_hyperparameters={},
    row_parser=read_row,
    presets={
        name: replace(
            TABLE3.presets[name],
            rows=make_rows(),
            models=("mlp",),
            model_settings={},
            datasets=TABLE3.presets[name].datasets[:1],
            method_settings={},
        )
        for name in ("quick", "short")
    },
)


def collect_objective_curves(table_run: TableRun) -> pd.DataFrame:
    """A row per run and round k: G(W^k) and the square of its gradient's length."""
    frames = []
    for cell, result in table_run.iterate_results():
        spec = result.spec.resolved()
        objective, gradient_norm = (
            np.asarray(result.metrics[name], np.float64)
            for name in ("objective", "objective_gradient")
        )
        frames.append(
            pd.DataFrame(
                {
                    "dataset": cell.dataset,
                    "network": NETWORKS_BY_DEPTH[len(spec.network_options["hidden"])],
                    "K": spec.rounds - 1,
                    "seed": spec.seed,
                    "k": np.arange(spec.rounds),
                    "objective": objective,
                    "gradient": gradient_norm**2,
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def summarize_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """A row per run: both at W^0, and their lowest values."""
    run_columns = ["dataset", "network", "K", "seed"]
    by_run = curves.groupby(run_columns, sort=False)[["objective", "gradient"]]
    summary = by_run.first().add_prefix("first_").join(by_run.min().add_prefix("lowest_"))
    return summary.reset_index()


def fit_rate(rounds: pd.Series, values: pd.Series) -> float:
    """The slope of logarithms; NaN of fewer than two positive values."""
    positive = values > 0
    if positive.sum() < 2:
        return math.nan
    return float(np.polyfit(np.log(rounds[positive]), np.log(values[positive]), 1)[0])


def make_text_table(table: pd.DataFrame, title: str) -> TextTable:
    sections = []
    for (dataset, network), network_rows in table.groupby(["dataset", "network"], sort=False):
        means = network_rows.groupby("K").mean(numeric_only=True).reset_index()
        rates = {name: fit_rate(means["K"], means[f"lowest_{name}"]) for name in RATE_LABELS}
        texts = [
            {
                "K": f"{row.K:g}",
                "G at the start": format_number(row.first_objective, ".3f"),
                "Lowest G": format_number(row.lowest_objective, ".3f"),
                "Gradient² at the start": format_number(row.first_gradient, ".3g"),
                "Lowest gradient²": format_number(row.lowest_gradient, ".3g"),
            }
            for row in means.itertuples(index=False)
        ]
        rates_text = ", ".join(
            f"{RATE_LABELS[name]} {format_number(rates[name], '+.2f')}" for name in RATE_LABELS
        )
        labels = {"Data": dataset, "Network": network}
        title_ = f"{dataset}, {network}: {rates_text}"
        sections.append(TableSection(rows=tuple(texts), title=title_, labels=labels))
    return TextTable(title, ("K",), tuple(texts[0])[1:], tuple(sections), (CAPTION, TABLE3.note))


def plot_convergence(curves: pd.DataFrame, table: pd.DataFrame):
    """Left G along the runs with the largest K, right the lowest squared gradient against K,
    and the rate 1 / sqrt(K) through the first."""
    from matplotlib.lines import Line2D

    figure, panels = make_panels(
        ["lowest G of W^0 to W^k", "lowest ||grad G||^2 of W^0 to W^K"],
        columns=2,
        size=(4.4, 3.4),
        sharey="none",
    )
    objective, gradient = panels.values()
    for network, network_curves in curves.groupby("network", sort=False):
        color = NETWORK_COLORS[network]
        longest = network_curves[network_curves["K"] == network_curves["K"].max()]
        for _, run in longest.groupby("seed"):
            objective.plot(run["k"] + 1, run["objective"].cummin(), color=color, lw=1.3)
        means = table[table["network"] == network].groupby("K")["lowest_gradient"].mean()
        gradient.plot(means.index, means, color=color, marker="o", ms=4)
        bound = means.iloc[0] * np.sqrt(means.index[0] / means.index)
        gradient.plot(means.index, bound, color=color, ls=":", lw=1.2)
    objective.set_xlabel("k + 1", fontsize=10)
    gradient.set_xlabel("K", fontsize=10)
    for panel in panels.values():
        panel.set_xscale("log")
        panel.set_yscale("log")
        style_axes(panel)
    handles = [
        Line2D([], [], color=color, lw=2, label=name) for name, color in NETWORK_COLORS.items()
    ]
    handles.append(Line2D([], [], color="#444444", ls=":", label="1 / sqrt(K), through the first"))
    add_legend(figure, handles)
    return figure


def write_outputs(table_run: TableRun) -> list[str]:
    curves = collect_objective_curves(table_run)
    if not len(curves):
        print("No run is there to be drawn.")
        return []
    table = summarize_curves(curves)
    texts = make_text_table(table, f"{table_run.title}.")
    figures = {"theory.png": plot_convergence(curves, table)}
    return write_table_files(table_run.directory, "theory", texts, table, figures)


main = make_table_program(THEORY, write_outputs)
