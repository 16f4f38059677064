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

from experiments.fedamp.table3 import TABLE3
from fedjax_het.common.pictures import plain_axes
from fedjax_het.report.paper_table import Outcome, program
from fedjax_het.report.paper_table.declaration import parse_row_of_any
from fedjax_het.report.render import Section, TextTable, number_text
from fedjax_het.report.style import add_legend, make_panels
from fedjax_het.report.write import publish

ROUNDS = (4, 16, 64, 256)
STRENGTH = 1.0  # lambda
SIGMA = 10.0
WIDTH = 128
NETWORKS = {0: "linear", 2: "two hidden layers"}  # by the number of layers
LOOKS = {"linear": "#0072B2", "two hidden layers": "#D55E00"}
RATES = {"objective": "rate of G", "gradient": "of gradient²"}
CAPTION = (
    f"lambda {STRENGTH:g}, sigma {SIGMA:g}, alpha lambda / sqrt(K). Start: at W^0. Lowest: of W^0 "
    "to W^K. Rate: the slope of the lowest over K in logarithms; the theorems bound what is above "
    "G*, which is 0 or more, and the gradient's square by constants times K^-0.5. Means over seeds."
)


def rows() -> tuple[str, ...]:
    return tuple(f"fedamp(layers={layers}, K={K})" for layers in NETWORKS for K in ROUNDS)


def read_row(row: str, dataset: str):
    method, variant = parse_row_of_any(row, dataset)
    rounds = variant.pop("K")
    return method, {
        "network_options": {"hidden": [WIDTH] * variant.pop("layers")},
        "rounds": rounds + 1,
        "gradient_gaps": 1,
        "local_epochs": 5,
        "scale": "absolute",
        "hp": {
            "sigma": SIGMA,
            "prox_lambda": STRENGTH,
            "alpha": STRENGTH / math.sqrt(rounds),
            "local_lr": 0.03,  # times the strongest pull, sqrt(256), it is stable
        },
    }


THEORY = replace(
    TABLE3,
    name="fedamp-theory",
    folder="",
    title="FedAMP, Theorems 1 and 2: the objective and its gradient.",
    reported=False,
    focus="",
    tuning={},
    read_row=read_row,
    presets={
        name: replace(
            TABLE3.presets[name],
            rows=rows(),
            models=("mlp",),
            model_settings={},
            datasets=TABLE3.presets[name].datasets[:1],
            method_settings={},
        )
        for name in ("quick", "short")
    },
)


def along(outcome: Outcome) -> pd.DataFrame:
    """A row per run and round k: G(W^k) and the square of its gradient's length."""
    frames = []
    for cell, result in outcome.made():
        spec = result.spec
        objective, slope = (
            np.asarray(result.metrics[name], np.float64)
            for name in ("objective", "objective_gradient")
        )
        frames.append(
            pd.DataFrame(
                {
                    "dataset": cell.dataset,
                    "network": NETWORKS[len(spec.network_options["hidden"])],
                    "K": spec.rounds - 1,
                    "seed": spec.seed,
                    "k": np.arange(spec.rounds),
                    "objective": objective,
                    "gradient": slope**2,
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def lowest(curves: pd.DataFrame) -> pd.DataFrame:
    """A row per run: both at W^0, and their lowest values."""
    runs = ["dataset", "network", "K", "seed"]
    by_run = curves.groupby(runs, sort=False)[["objective", "gradient"]]
    found = by_run.first().add_prefix("first_").join(by_run.min().add_prefix("lowest_"))
    return found.reset_index()


def rate(rounds: pd.Series, values: pd.Series) -> float:
    """The slope of logarithms; NaN of fewer than two positive values."""
    positive = values > 0
    if positive.sum() < 2:
        return math.nan
    return float(np.polyfit(np.log(rounds[positive]), np.log(values[positive]), 1)[0])


def text_table(table: pd.DataFrame, title: str) -> TextTable:
    sections = []
    for (dataset, network), own in table.groupby(["dataset", "network"], sort=False):
        means = own.groupby("K").mean(numeric_only=True).reset_index()
        rates = {name: rate(means["K"], means[f"lowest_{name}"]) for name in RATES}
        texts = [
            {
                "K": f"{row.K:g}",
                "G at the start": number_text(row.first_objective, ".3f"),
                "Lowest G": number_text(row.lowest_objective, ".3f"),
                "Gradient² at the start": number_text(row.first_gradient, ".3g"),
                "Lowest gradient²": number_text(row.lowest_gradient, ".3g"),
            }
            for row in means.itertuples(index=False)
        ]
        said = ", ".join(f"{RATES[name]} {number_text(rates[name], '+.2f')}" for name in RATES)
        labels = {"Data": dataset, "Network": network}
        title_ = f"{dataset}, {network}: {said}"
        sections.append(Section(rows=tuple(texts), title=title_, labels=labels))
    return TextTable(title, ("K",), tuple(texts[0])[1:], tuple(sections), (CAPTION, TABLE3.note))


def draw(curves: pd.DataFrame, table: pd.DataFrame):
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
    for network, own in curves.groupby("network", sort=False):
        colour = LOOKS[network]
        longest = own[own["K"] == own["K"].max()]
        for _, run in longest.groupby("seed"):
            objective.plot(run["k"] + 1, run["objective"].cummin(), color=colour, lw=1.3)
        means = table[table["network"] == network].groupby("K")["lowest_gradient"].mean()
        gradient.plot(means.index, means, color=colour, marker="o", ms=4)
        bound = means.iloc[0] * np.sqrt(means.index[0] / means.index)
        gradient.plot(means.index, bound, color=colour, ls=":", lw=1.2)
    objective.set_xlabel("k + 1", fontsize=10)
    gradient.set_xlabel("K", fontsize=10)
    for panel in panels.values():
        panel.set_xscale("log")
        panel.set_yscale("log")
        plain_axes(panel)
    handles = [Line2D([], [], color=colour, lw=2, label=name) for name, colour in LOOKS.items()]
    handles.append(Line2D([], [], color="#444444", ls=":", label="1 / sqrt(K), through the first"))
    add_legend(figure, handles)
    return figure


def write(outcome: Outcome) -> list[str]:
    curves = along(outcome)
    if not len(curves):
        print("No run is there to be drawn.")
        return []
    table = lowest(curves)
    texts = text_table(table, f"{outcome.title}.")
    figures = {"theory.png": draw(curves, table)}
    return publish(outcome.directory, "theory", texts, table, figures)


main = program(THEORY, write)

if __name__ == "__main__":
    raise SystemExit(main())
