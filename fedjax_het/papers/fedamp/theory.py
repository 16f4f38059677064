"""FedAMP's Theorems 1 and 2: the objective G(W) and its gradient along runs.

python experiments/fedamp/theory.py                  the embedded digits, a minute on 2 cores
python experiments/fedamp/theory.py --preset short   Fashion-MNIST: half an hour

The theorems hold after K rounds with alpha_k = lambda / sqrt(K). They bound min_k G(W^k) - G* for
convex G, and min_k ||grad G(W^k)||^2 for smooth G, by constants over sqrt(K). The constants
(B, L, G*) are not known; `theory.png` shows that rate through the first value beside the runs.
There is a row for each K and network. The networks are a linear one, whose losses F are convex (the
attention A is not), and the usual one. In the absolute scale, G does not change between rounds.
Runs have one round more than K, before which W^K is measured. Clients approximate Eq. 6 by their
epochs of SGD, while the theorems have a separate step for it.
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from fedjax_het.analysis import parse_row
from fedjax_het.analysis.figures.style import add_legend, make_panels, style_axes
from fedjax_het.analysis.render import TableSection, TextTable, format_number
from fedjax_het.papers.fedamp.tables import TABLE3
from fedjax_het.papers.table import TableRun, make_table_program

ROUNDS = (4, 16, 64, 256)
PROX_LAMBDA = 1.0
SIGMA = 10.0
HIDDEN_WIDTH = 128
NETWORKS_BY_DEPTH = {0: "linear", 2: "two hidden layers"}
NETWORK_COLORS = {"linear": "#0072B2", "two hidden layers": "#D55E00"}
RATE_LABELS = {"objective": "rate of G", "gradient": "of gradient²"}
CAPTION = (
    f"lambda {PROX_LAMBDA:g}, sigma {SIGMA:g}, alpha lambda / sqrt(K). Start: at W^0. Lowest: of "
    "W^0 to W^K. Rate: the slope of the lowest over K in logarithms. The theorems bound G - G* "
    "(with G* >= 0) and the gradient's square by constants times K^-0.5. Means over seeds."
)


ROWS = tuple(f"fedamp(layers={layers}, K={K})" for layers in NETWORKS_BY_DEPTH for K in ROUNDS)


def _parse_theory_row(row: str, dataset: str):
    """Read the number of hidden layers and the number of rounds K."""
    method, variant = parse_row(row)
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
    row_parser=_parse_theory_row,
    presets={
        name: replace(
            TABLE3.presets[name],
            rows=ROWS,
            models=("mlp",),
            model_settings={},
            datasets=TABLE3.presets[name].datasets[:1],
            method_settings={},
        )
        for name in ("quick", "short")
    },
)


def collect_objective_curves(table_run: TableRun) -> pd.DataFrame:
    """Return G(W^k) and the square of its gradient's length, a row per run and round k."""
    frames = []
    for cell, result in table_run.iterate_results():
        spec = result.spec.resolved()
        objective, gradient_norm = (
            np.asarray(result.metrics[name], np.float64)
            for name in ("objective", "objective_gradient")
        )
        columns = {
            "dataset": cell.dataset,
            "network": NETWORKS_BY_DEPTH[len(spec.network_options["hidden"])],
            "K": spec.rounds - 1,
            "seed": spec.seed,
            "k": np.arange(spec.rounds),
            "objective": objective,
            "gradient": gradient_norm**2,
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def summarize_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the values at W^0 and the lowest ones, a row per run."""
    run_columns = ["dataset", "network", "K", "seed"]
    by_run = curves.groupby(run_columns, sort=False)[["objective", "gradient"]]
    summary = by_run.first().add_prefix("first_").join(by_run.min().add_prefix("lowest_"))
    return summary.reset_index()


def fit_rate(rounds: pd.Series, values: pd.Series) -> float:
    """Fit the exponent of a power of the rounds.

    Args:
      rounds: numbers of rounds.
      values: values at these rounds; only positive ones count.

    Returns:
      Slope of the logarithms; NaN for fewer than two positive values.
    """
    positive = values > 0
    if positive.sum() < 2:
        return math.nan
    return float(np.polyfit(np.log(rounds[positive]), np.log(values[positive]), 1)[0])


def make_text_table(table: pd.DataFrame, title: str) -> TextTable:
    """Format means over seeds of `summarize_curves`.

    Args:
      table: the summary.
      title: title of the table.

    Returns:
      A section per data set and network.
    """
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
            f"{label} {format_number(rates[name], '+.2f')}" for name, label in RATE_LABELS.items()
        )
        labels = {"Data": dataset, "Network": network}
        sections.append(TableSection(texts, f"{dataset}, {network}: {rates_text}", labels))
    return TextTable(title, ["K"], sections, [CAPTION, TABLE3.note])


def plot_convergence(curves: pd.DataFrame, table: pd.DataFrame):
    """Plot G along the runs with the largest K, and the lowest squared gradient against K.

    Args:
      curves: curves of `collect_objective_curves`.
      table: summary of `summarize_curves`.

    Returns:
      A figure with two panels; dotted lines are the rate 1 / sqrt(K) through the first value.
    """
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


def _write_outputs(table_run: TableRun) -> list[str]:
    curves = collect_objective_curves(table_run)
    if not len(curves):
        print("There is no run to draw.")
        return []
    table = summarize_curves(curves)
    texts = make_text_table(table, f"{table_run.title}.")
    figures = {"theory.png": plot_convergence(curves, table)}
    return table_run.write_table("theory", texts, table, figures)


main = make_table_program(THEORY, _write_outputs)
