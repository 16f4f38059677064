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

from experiments.dynafed.settings import CONTROLS, EXPERIMENT, QUICK
from fedjax_het.common.pictures import plain_axes
from fedjax_het.measures.theory import gradient_error
from fedjax_het.report.cell import row_text
from fedjax_het.report.line_ends import End, name_ends
from fedjax_het.report.paper_table import Outcome, program
from fedjax_het.report.render import Section, TextTable, number_text
from fedjax_het.report.style import add_note, make_panels
from fedjax_het.report.write import publish
from fedjax_het.running.result import Result

ROWS = ("dynafed", *CONTROLS)
LOOKS = dict(zip(ROWS, ("#D55E00", "#777777", "#0072B2"), strict=True))
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
    reported=False,
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


def measured(result: Result) -> dict[str, np.ndarray]:
    """Rounds t, the lengths of the error and of both gradients, of the rounds that have all."""
    names = ("server_gap", "gradient_norm", "server_norm")
    gap, whole, own = (np.asarray(result.metrics[name], np.float64) for name in names)
    known = np.flatnonzero(np.isfinite(gap) & np.isfinite(whole))
    gap, whole, own = gap[known], whole[known], own[known]
    cosine = (whole**2 + own**2 - gap) / np.maximum(2 * whole * own, 1e-30)
    return {"round": known, "error": np.sqrt(gap), "gradient": whole, "cosine": cosine}


def summary(curves: dict[str, np.ndarray]) -> dict[str, float]:
    bound = gradient_error(curves["error"], curves["gradient"])
    means = {name: float(curves[name].mean()) for name in ("error", "gradient", "cosine")}
    return {**means, **bound._asdict()}


def text_table(table: pd.DataFrame, title: str) -> TextTable:
    sections = []
    for (dataset, alpha), rows in table.groupby(["dataset", "alpha"], sort=False):
        texts = []
        for method, own in rows.groupby("method", sort=False):
            mean = own.mean(numeric_only=True)
            texts.append(
                {
                    "Method": method,
                    "Error": number_text(mean["error"], ".3f"),
                    "Gradient": number_text(mean["gradient"], ".3f"),
                    "Ratio": number_text(mean["relative"], ".2f"),
                    "Cosine": number_text(mean["cosine"], "+.3f"),
                    "delta": number_text(mean["delta"], ".3f"),
                    "epsilon": number_text(mean["epsilon"], ".3f"),
                    "Seeds": str(len(own)),
                }
            )
        labels = {"Data": dataset, "alpha": f"{alpha:g}"}
        title_ = f"{dataset}, alpha {alpha:g}"
        sections.append(Section(rows=tuple(texts), title=title_, labels=labels))
    return TextTable(title, ("Method",), tuple(texts[0])[1:], tuple(sections), (CAPTION,))


def draw(found: list[tuple[str, str, dict[str, np.ndarray]]]):
    """A panel for each column: the error in lengths of the gradient of all data, mean over seeds,
    each seed a thin line. Where it is 1, no data would do as well."""
    panels = list(dict.fromkeys(panel for panel, _, _ in found))
    figure, axes = make_panels(panels, columns=3, size=(4.2, 3.0), sharey="row")
    ends: dict[str, list[End]] = {panel: [] for panel in panels}
    for panel in panels:
        for method, colour in LOOKS.items():
            own = [curves for place, row, curves in found if (place, row) == (panel, method)]
            if not own:
                continue
            runs = [pd.Series(each["error"] / each["gradient"], each["round"]) for each in own]
            for run in runs:
                axes[panel].plot(run.index, run, color=colour, lw=0.7, alpha=0.45)
            mean = pd.concat(runs, axis=1).mean(axis=1)
            name = row_text(method)
            axes[panel].plot(mean.index, mean, color=colour, lw=1.8, label=name)
            ends[panel].append(End(name, float(mean.iloc[-1]), colour))
    for axis in axes.values():
        axis.axhline(1.0, color="#666666", lw=0.8, ls="--")
        axis.set_xlabel("Round", fontsize=10)
        axis.margins(x=0)
        plain_axes(axis)
    axes[panels[0]].set_ylabel("Error of the gradient,\nin its lengths", fontsize=10)
    name_ends(figure, {axes[panel]: own for panel, own in ends.items()})
    add_note(figure, "thin: single seeds; dashed: as wrong as no gradient at all")
    return figure


def write(outcome: Outcome) -> list[str]:
    rows, found = [], []
    for cell, result in outcome.made():
        curves = measured(result)
        about = {"dataset": cell.dataset, "alpha": cell.alpha, "method": cell.method}
        rows.append({**about, "seed": result.spec.seed, **summary(curves)})
        found.append((cell.group, cell.method, curves))
    if not rows:
        print("No run is there to be drawn.")
        return []
    table = pd.DataFrame(rows)
    texts = text_table(table, f"{outcome.title}.")
    return publish(outcome.directory, "theory", texts, table, {"theory.png": draw(found)})


main = program(THEORY, write)

if __name__ == "__main__":
    raise SystemExit(main())
