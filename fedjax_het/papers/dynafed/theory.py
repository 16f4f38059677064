"""DynaFed's Assumption 3: distance of the gradients on synthetic data and on all clients' data.

python experiments/dynafed/theory.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/theory.py --preset cpu     Fashion-MNIST, MLP: twenty minutes

The paper proves convergence if ||grad L(w, D_syn) - grad L(w, D)|| <= delta ||grad L(w, D)|| +
epsilon with two small numbers. It measures neither. This program measures them at the models that
rounds start from, for the synthetic data and for both controls. `theory.png` shows the error in
units of the gradient's length. `theory.md` lists the lowest delta and epsilon that hold in all
measured rounds. Delta 1 and epsilon 0 always hold for data without information on the
gradient (a gradient of 0).
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.figures.direct_labels import LineLabel, label_line_ends
from fedjax_het.analysis.figures.style import add_note, make_panels, style_axes
from fedjax_het.analysis.render import TableSection, TextTable, format_number
from fedjax_het.papers.convergence_bounds import fit_gradient_error
from fedjax_het.papers.dynafed.settings import CONTROLS, EXPERIMENT, QUICK
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.runtime.results import Result

ROWS = ("dynafed", *CONTROLS)
ROW_COLORS = dict(zip(ROWS, ("#D55E00", "#777777", "#0072B2"), strict=True))
CAPTION = (
    "Values are of the measured rounds after the synthesis. Error: norm of the difference of the "
    "two gradients; gradient: norm of the gradient over all clients' data; both mean over rounds. "
    "Ratio: the largest of any round. Cosine: between the two gradients, mean over rounds. Bound: "
    "delta and epsilon of Assumption 3, the pair that holds in all rounds and is lowest on "
    "average. Means over seeds."
)
# Columns of the table, with the keys of `summarize_curves` and formats.
_COLUMNS = {
    "Error": ("error", ".3f"),
    "Gradient": ("gradient", ".3f"),
    "Ratio": ("relative", ".2f"),
    "Cosine": ("cosine", "+.3f"),
    "delta": ("delta", ".3f"),
    "epsilon": ("epsilon", ".3f"),
}

THEORY = EXPERIMENT(
    name="dynafed-theory",
    item="fig6",
    title="DynaFed, Assumption 3: the error of the synthetic data's gradient.",
    has_reported_values=False,
    presets={
        "quick": replace(QUICK, rows=ROWS, settings={**QUICK.settings, "gradient_gaps": 1}),
        "cpu": replace(
            QUICK,
            datasets=("fashion_mnist",),
            alphas=(0.01,),
            rows=ROWS,
            settings={"rounds": 60, "gradient_gaps": 2},
            method_settings={},
        ),
    },
)


def gradient_curves(result: Result) -> dict[str, np.ndarray]:
    """Return the measured gradients of a run.

    Args:
      result: result of a run with `gradient_gaps`.

    Returns:
      For the rounds that have all values: `round`, `error` (length of the difference), `gradient`
      (length of the gradient of all data) and `cosine`.
    """
    names = ("server_gap", "gradient_norm", "server_norm")
    values = np.array([np.asarray(result.metrics[name], np.float64) for name in names])
    rounds = np.flatnonzero(np.isfinite(values[:2]).all(axis=0))
    gap, full_norm, synthetic_norm = values[:, rounds]
    product = np.maximum(2 * full_norm * synthetic_norm, 1e-30)
    cosine = (full_norm**2 + synthetic_norm**2 - gap) / product
    return {"round": rounds, "error": np.sqrt(gap), "gradient": full_norm, "cosine": cosine}


def summarize_curves(curves: dict[str, np.ndarray]) -> dict[str, float]:
    """Return means over rounds and the fields of `GradientError`."""
    bound = fit_gradient_error(curves["error"], curves["gradient"])
    means = {name: float(curves[name].mean()) for name in ("error", "gradient", "cosine")}
    return {**means, **bound._asdict()}


def format_means(
    rows: pd.DataFrame, columns: Mapping[str, tuple[str, str]]
) -> list[dict[str, str]]:
    """Format the means over seeds of each method.

    Args:
      rows: a row per run, with its `method`.
      columns: by heading, the column of `rows` and the format of its number.

    Returns:
      Texts of each method by heading, with the number of seeds.
    """
    texts = []
    for method, method_rows in rows.groupby("method", sort=False):
        mean = method_rows.mean(numeric_only=True)
        numbers = {name: format_number(mean[key], spec) for name, (key, spec) in columns.items()}
        texts.append({"Method": format_row(method), **numbers, "Seeds": str(len(method_rows))})
    return texts


def make_text_table(table: pd.DataFrame, title: str) -> TextTable:
    """Format means over seeds.

    Args:
      table: a row per run with its data set, alpha, method and `summarize_curves`.
      title: title of the table.

    Returns:
      A section per data set and alpha.
    """
    sections = []
    for (dataset, alpha), rows in table.groupby(["dataset", "alpha"], sort=False):
        texts = format_means(rows, _COLUMNS)
        labels = {"Data": dataset, "alpha": f"{alpha:g}"}
        sections.append(TableSection(texts, f"{dataset}, alpha {alpha:g}", labels))
    return TextTable(title, ["Method"], sections, [CAPTION])


def plot_gradient_errors(curves_by_row: list[tuple[str, str, dict[str, np.ndarray]]]):
    """Plot the error in lengths of the gradient of all data; at 1, no data would do as well.

    Args:
      curves_by_row: panel, row and `gradient_curves` of each run.

    Returns:
      A figure with a panel per column; a line is the mean over seeds, a thin line one seed.
    """
    titles = list(dict.fromkeys(panel for panel, _, _ in curves_by_row))
    figure, panels = make_panels(titles, columns=3, size=(4.2, 3.0), sharey="row")
    labels: dict[str, list[LineLabel]] = {title: [] for title in titles}
    for title, panel in panels.items():
        for method, color in ROW_COLORS.items():
            runs = [
                pd.Series(curves["error"] / curves["gradient"], curves["round"])
                for name, row, curves in curves_by_row
                if (name, row) == (title, method)
            ]
            for run in runs:
                panel.plot(run.index, run, color=color, lw=0.7, alpha=0.45)
            if runs:
                mean, name = pd.concat(runs, axis=1).mean(axis=1), format_row(method)
                panel.plot(mean.index, mean, color=color, lw=1.8, label=name)
                labels[title].append(LineLabel(name, float(mean.iloc[-1]), color))
        panel.axhline(1.0, color="#666666", lw=0.8, ls="--")
        panel.set_xlabel("Round", fontsize=10)
        panel.margins(x=0)
        style_axes(panel)
    panels[titles[0]].set_ylabel("Error of the gradient,\nin its lengths", fontsize=10)
    label_line_ends(figure, {panels[title]: own for title, own in labels.items()})
    add_note(figure, "thin: single seeds; dashed: as wrong as no gradient at all")
    return figure


def _write_outputs(table_run: TableRun) -> list[str]:
    rows, curves_by_row = [], []
    for cell, result in table_run.iterate_results():
        curves = gradient_curves(result)
        identifiers = {"dataset": cell.dataset, "alpha": cell.alpha, "method": cell.method}
        rows.append({**identifiers, "seed": result.spec.seed, **summarize_curves(curves)})
        curves_by_row.append((cell.column_label, cell.method, curves))
    if not rows:
        print("There is no run to draw.")
        return []
    table = pd.DataFrame(rows)
    texts = make_text_table(table, f"{table_run.title}.")
    figures = {"theory.png": plot_gradient_errors(curves_by_row)}
    return table_run.write_table("theory", texts, table, figures)


main = make_table_program(THEORY, _write_outputs)
