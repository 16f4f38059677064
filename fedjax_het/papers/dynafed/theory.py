"""DynaFed's Assumption 3: how far the synthetic data's gradient is from that of all clients' data.

python experiments/dynafed/theory.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/theory.py --preset cpu     Fashion-MNIST, MLP: twenty minutes

The paper proves convergence where ||grad L(w, D_syn) - grad L(w, D)|| <= delta ||grad L(w, D)|| +
epsilon with two small numbers, and measures neither. Here they are measured at the models that
rounds start from, for the synthetic data and for both controls: `theory.png` draws the error in
lengths of the gradient, `theory.md` lists the delta and epsilon that hold in all measured rounds
and are lowest together. Where data say nothing of the gradient (it could as well be 0), delta 1 and
epsilon 0 do.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.direct_labels import LineLabel, label_line_ends
from fedjax_het.analysis.figure_style import add_note, make_panels
from fedjax_het.analysis.figures.output import style_axes
from fedjax_het.analysis.render import TableSection, TextTable, format_number
from fedjax_het.analysis.report import write_table_files
from fedjax_het.papers.convergence_bounds import fit_gradient_error
from fedjax_het.papers.dynafed.settings import CONTROLS, EXPERIMENT, QUICK
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.runtime.results import Result

ROWS = ("dynafed", *CONTROLS)
ROW_COLORS = dict(zip(ROWS, ("#D55E00", "#777777", "#0072B2"), strict=True))
CAPTION = (
    "Of the measured rounds after the synthesis. Error: length of the difference of the two "
    "gradients; gradient: length of that of all clients' data; both mean over rounds. Ratio: the "
    "largest of any round. Cosine: between the two gradients, mean over rounds. Bound: delta and "
    "epsilon of Assumption 3, the pair that holds in all rounds and is lowest on average. Means "
    "over seeds."
)

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
    """Rounds t, the lengths of the error and of both gradients, of the rounds that have all."""
    names = ("server_gap", "gradient_norm", "server_norm")
    gap, full_norm, synthetic_norm = (
        np.asarray(result.metrics[name], np.float64) for name in names
    )
    measured_rounds = np.flatnonzero(np.isfinite(gap) & np.isfinite(full_norm))
    gap, full_norm, synthetic_norm = (
        gap[measured_rounds],
        full_norm[measured_rounds],
        synthetic_norm[measured_rounds],
    )
    cosine = (full_norm**2 + synthetic_norm**2 - gap) / np.maximum(
        2 * full_norm * synthetic_norm, 1e-30
    )
    return {
        "round": measured_rounds,
        "error": np.sqrt(gap),
        "gradient": full_norm,
        "cosine": cosine,
    }


def summarize_curves(curves: dict[str, np.ndarray]) -> dict[str, float]:
    bound = fit_gradient_error(curves["error"], curves["gradient"])
    means = {name: float(curves[name].mean()) for name in ("error", "gradient", "cosine")}
    return {**means, **bound._asdict()}


def make_text_table(table: pd.DataFrame, title: str) -> TextTable:
    sections = []
    for (dataset, alpha), rows in table.groupby(["dataset", "alpha"], sort=False):
        texts = []
        for method, method_rows in rows.groupby("method", sort=False):
            mean = method_rows.mean(numeric_only=True)
            texts.append(
                {
                    "Method": method,
                    "Error": format_number(mean["error"], ".3f"),
                    "Gradient": format_number(mean["gradient"], ".3f"),
                    "Ratio": format_number(mean["relative"], ".2f"),
                    "Cosine": format_number(mean["cosine"], "+.3f"),
                    "delta": format_number(mean["delta"], ".3f"),
                    "epsilon": format_number(mean["epsilon"], ".3f"),
                    "Seeds": str(len(method_rows)),
                }
            )
        labels = {"Data": dataset, "alpha": f"{alpha:g}"}
        title_ = f"{dataset}, alpha {alpha:g}"
        sections.append(TableSection(rows=tuple(texts), title=title_, labels=labels))
    return TextTable(title, ("Method",), tuple(texts[0])[1:], tuple(sections), (CAPTION,))


def plot_gradient_errors(curves_by_row: list[tuple[str, str, dict[str, np.ndarray]]]):
    """A panel for each column: the error in lengths of the gradient of all data, mean over seeds,
    each seed a thin line. Where it is 1, no data would do as well."""
    panels = list(dict.fromkeys(panel for panel, _, _ in curves_by_row))
    figure, axes = make_panels(panels, columns=3, size=(4.2, 3.0), sharey="row")
    ends: dict[str, list[LineLabel]] = {panel: [] for panel in panels}
    for panel in panels:
        for method, color in ROW_COLORS.items():
            row_curves = [
                curves
                for panel_name, row, curves in curves_by_row
                if (panel_name, row) == (panel, method)
            ]
            if not row_curves:
                continue
            runs = [
                pd.Series(run_curves["error"] / run_curves["gradient"], run_curves["round"])
                for run_curves in row_curves
            ]
            for run in runs:
                axes[panel].plot(run.index, run, color=color, lw=0.7, alpha=0.45)
            mean = pd.concat(runs, axis=1).mean(axis=1)
            name = format_row(method)
            axes[panel].plot(mean.index, mean, color=color, lw=1.8, label=name)
            ends[panel].append(LineLabel(name, float(mean.iloc[-1]), color))
    for axis in axes.values():
        axis.axhline(1.0, color="#666666", lw=0.8, ls="--")
        axis.set_xlabel("Round", fontsize=10)
        axis.margins(x=0)
        style_axes(axis)
    axes[panels[0]].set_ylabel("Error of the gradient,\nin its lengths", fontsize=10)
    label_line_ends(figure, {axes[panel]: row_curves for panel, row_curves in ends.items()})
    add_note(figure, "thin: single seeds; dashed: as wrong as no gradient at all")
    return figure


def write_outputs(table_run: TableRun) -> list[str]:
    rows, curves_by_row = [], []
    for cell, result in table_run.iterate_results():
        curves = gradient_curves(result)
        identifiers = {"dataset": cell.dataset, "alpha": cell.alpha, "method": cell.method}
        rows.append({**identifiers, "seed": result.spec.seed, **summarize_curves(curves)})
        curves_by_row.append((cell.column_label, cell.method, curves))
    if not rows:
        print("No run is there to be drawn.")
        return []
    table = pd.DataFrame(rows)
    texts = make_text_table(table, f"{table_run.title}.")
    return write_table_files(
        table_run.directory,
        "theory",
        texts,
        table,
        {"theory.png": plot_gradient_errors(curves_by_row)},
    )


main = make_table_program(THEORY, write_outputs)
