"""Accuracy against epsilon of FedAvg, FedAdam and FSL with client-level differential privacy.

python experiments/privacy/epsilon.py                the embedded digits, minutes on 2 cores
python experiments/privacy/epsilon.py --preset cpu   Fashion-MNIST, 2,000 clients: an hour

Each round samples clients by Poisson sampling, clips their changes to the adapted norm (the median
of the clients' norms), and adds noise. FSL's server also trains on 1 % of the examples, which no
client holds and which are not private. The control is FSL whose clients' changes are clipped to
nothing, so that it trains on these examples alone. All rows are tuned with equal budgets, on a seed
that no row averages. The tuning itself is not private.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import add_row_settings
from fedjax_het.analysis.figures.style import add_legend, make_panels, style_axes
from fedjax_het.analysis.overview import get_method_title, get_metric_label
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_mean_std,
    format_number,
    format_p_value,
)
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.papers.table.columns import run_paired_test
from fedjax_het.runtime.results import Result
from fedjax_het.tuning.tuner import DEFAULT_BUDGET

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISE_MULTIPLIERS = (0.5, 1.0, 2.0, 4.0, 8.0)
PRIVATE_METHODS = ("fedavg", "fedadam", "fsl")
CONTROL = "server's examples alone"
MIN_PAIRS = 3


class Condition(NamedTuple):
    """A row: a method with noise, without privacy, or the control."""

    method: str
    noise: float | None
    "Noise multiplier; None without privacy."
    name: str
    row: str


def list_conditions() -> list[Condition]:
    """List the rows: the control, and each method without privacy and at each noise.

    Example:
      >>> from fedjax_het.papers.privacy.epsilon import list_conditions
      >>> list_conditions()[2].row
      "fedavg(privacy='client_level:noise_multiplier=0.5,clip_norm=0.5,quantile=0.5')"
    """
    no_change = "client_level:noise_multiplier=0,clip_norm=1e-09"
    conditions = [Condition("fsl", None, CONTROL, add_row_settings("fsl", privacy=no_change))]
    for method in PRIVATE_METHODS:
        conditions.append(Condition(method, None, get_method_title(method), method))
        for noise in NOISE_MULTIPLIERS:
            privacy = f"client_level:noise_multiplier={noise:g},clip_norm=0.5,quantile=0.5"
            row = add_row_settings(method, privacy=privacy)
            conditions.append(Condition(method, noise, get_method_title(method), row))
    return conditions


def _make_preset(dataset: str, num_clients: int, participation: float, rounds: int) -> Preset:
    server = {"server_data": "held_out", "pretrain_epochs": 0}
    return Preset(
        datasets=(dataset,),
        models=("mlp",),
        alphas=(1.0,),
        seeds=(0, 1, 2),
        rows=tuple(condition.row for condition in list_conditions()),
        settings={
            **{"rounds": rounds, "num_clients": num_clients, "participation": participation},
            **{"eval_every": 5, "network_options": {"hidden": [32]}},
        },
        method_settings={"fsl": server},
    )


TABLE = TableDeclaration(
    name="epsilon",
    paper="fsl",
    item="privacy",
    title="Client-level differential privacy.",
    has_reported_values=False,
    protocol="standard",
    budget=DEFAULT_BUDGET,
    search_space={"local_lr": (0.02, 1.0)},
    settings={
        **{"local_epochs": 1, "batch_size": 10, "momentum": 0.0},
        **{"averaging": "uniform", "system": "poisson_sampling", "partition": "dirichlet"},
    },
    presets={
        "quick": _make_preset("digits", 100, 0.5, 20),
        "cpu": _make_preset("fashion_mnist", 2000, 0.2, 40),
    },
)


def score_run(result: Result) -> dict[str, float]:
    """Return `accuracy`, the mean of the last five evaluations in percent, and `epsilon`.

    Args:
      result: a finished run.

    Returns:
      The scores by name; epsilon is infinite without privacy.
    """
    epsilon = result.summary.get("epsilon")
    return {
        "accuracy": 100 * result.summary["final_accuracy"],
        "epsilon": math.inf if epsilon is None else epsilon,
    }


def compare_methods(scores: pd.DataFrame) -> pd.DataFrame:
    """Compare each row with FedAvg at equal noise and with the control, paired over seeds.

    Args:
      scores: `TableRun.collect_scores(score_run)`.

    Returns:
      A row per data set and condition: `dataset`, `name`, `noise`, `epsilon`, the mean `accuracy`
      and its deviation `std` over `seeds` runs; the mean differences `over_fedavg` and
      `over_control` with half the widths of their 95 % confidence intervals, `fedavg_half_width`
      and `control_half_width`, and their p-values `fedavg_p` and `control_p`.
    """
    records = []
    conditions = list_conditions()
    for dataset, table in scores.groupby("dataset", sort=False):
        own = {row: group.set_index("seed") for row, group in table.groupby("row")}
        for condition in conditions:
            if condition.row not in own:
                continue
            runs = own[condition.row]
            accuracies = runs["accuracy"].dropna()
            record: dict[str, Any] = {"dataset": dataset, "name": condition.name}
            record |= {"noise": condition.noise, "epsilon": runs["epsilon"].mean()}
            record |= {"accuracy": accuracies.mean(), "std": accuracies.std()}
            record["seeds"] = len(accuracies)
            fedavg = next(
                c.row for c in conditions if (c.method, c.noise) == ("fedavg", condition.noise)
            )
            for name, row in (("fedavg", fedavg), ("control", conditions[0].row)):
                if row != condition.row and row in own:
                    reference = own[row]["accuracy"].dropna()
                    test = run_paired_test(accuracies, reference, MIN_PAIRS)
                    record[f"over_{name}"] = test.mean
                    record |= {f"{name}_half_width": test.half_width, f"{name}_p": test.p_value}
            records.append(record)
    return pd.DataFrame(records)


def make_text(table: pd.DataFrame, title: str) -> TextTable:
    """Format the comparison.

    Args:
      table: as `compare_methods` returns it.
      title: title of the table.

    Returns:
      A section per data set.
    """
    sections = []
    for dataset, own in table.groupby("dataset", sort=False):
        rows = []
        for record in own.to_dict("records"):
            row = {
                "Method": record["name"],
                "Noise": format_number(record["noise"], "g"),
                "Epsilon": format_number(record["epsilon"], ".2f")
                if math.isfinite(record["epsilon"])
                else MISSING,
                "Accuracy": format_mean_std(record["accuracy"], record["std"]),
            }
            for label, name in (("Over FedAvg", "fedavg"), ("Over control", "control")):
                mean, half = (record.get(k) for k in (f"over_{name}", f"{name}_half_width"))
                is_known = mean is not None and math.isfinite(mean)
                row[label] = f"{mean:+.1f} ± {half:.1f}" if is_known else MISSING
                row[f"p ({name})"] = format_p_value(record.get(f"{name}_p", math.nan))
            rows.append(row | {"Seeds": str(record["seeds"])})
        sections.append(TableSection(rows, str(dataset), {"Data": str(dataset)}))
    note = (
        "Test accuracy in %, mean of the last five evaluations ± deviation over seeds. Epsilon of "
        "one client at delta 1e-5 after all rounds, without the tuning. Differences: mean over "
        "seeds ± half of the 95 % confidence interval, p of paired t-tests without correction. The "
        "control trains on the server's examples alone, which are not private."
    )
    return TextTable(title, ["Method", "Noise"], sections, [note], ("Seeds",))


def plot_epsilons(table: pd.DataFrame) -> "Figure":
    """Plot the accuracy against epsilon, a panel per data set.

    A line is a method; dashed lines across the panel are the methods without privacy, the dotted
    line is the control. Bars are deviations over seeds.

    Args:
      table: as `compare_methods` returns it.

    Returns:
      The figure.
    """
    datasets = list(dict.fromkeys(table["dataset"]))
    figure, panels = make_panels(datasets, columns=len(datasets), size=(5.2, 3.6), sharey="none")
    for dataset, panel in panels.items():
        style_axes(panel)
        own = table[table["dataset"] == dataset]
        for method in PRIVATE_METHODS:
            title, color = get_method_title(method), METHODS[method].color
            runs = own[own["name"] == title].sort_values("epsilon")
            private = runs[runs["noise"].notna()]
            bars: dict[str, Any] = {"marker": "o", "ms": 4, "capsize": 2, "label": title}
            panel.errorbar(
                private["epsilon"], private["accuracy"], private["std"], color=color, **bars
            )
            for accuracy in runs.loc[runs["noise"].isna(), "accuracy"]:
                panel.axhline(accuracy, color=color, ls="--", lw=1)
        for accuracy in own.loc[own["name"] == CONTROL, "accuracy"]:
            panel.axhline(accuracy, color="0.3", ls=":", lw=1.2, label=CONTROL)
        panel.set_xscale("log")
        panel.set_xlabel("epsilon at delta 1e-5", fontsize=10)
        panel.set_ylabel(get_metric_label("final_accuracy"))
    handles, _ = next(iter(panels.values())).get_legend_handles_labels()
    add_legend(figure, handles)
    return figure


def _write_outputs(table_run: TableRun) -> Sequence[str]:
    scores = table_run.collect_scores(score_run)
    if "accuracy" not in scores:
        print("There is no run to show.")
        return []
    table = compare_methods(scores)
    text = make_text(table, f"{table_run.title}.")
    return table_run.write_table("epsilon", text, table, {"epsilon.png": plot_epsilons(table)})


main = make_table_program(TABLE, _write_outputs)
