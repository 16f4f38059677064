"""DynaFed's Assumption 3: how far the synthetic data's gradient is from that of all clients' data.

python experiments/dynafed/theory.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/theory.py --preset cpu     Fashion-MNIST, MLP: twenty minutes

The paper proves convergence where ||grad L(w, D_syn) - grad L(w, D)|| <= delta ||grad L(w, D)|| +
epsilon with two small numbers, and measures neither. Here they are measured at the models that
rounds start from, for the synthetic data and for both controls: `theory.png` draws the two
lengths, `theory.md` lists the delta and epsilon that hold in all measured rounds and are lowest
together. Where data say nothing of the gradient (it could as well be 0), delta 1 and epsilon 0 do.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from experiments.dynafed.settings import CONTROLS, EXPERIMENT, QUICK
from fedjax_het.common.pictures import plain_axes
from fedjax_het.measures.theory import gradient_error
from fedjax_het.report.paper_table import Outcome, program
from fedjax_het.report.render import Section, TextTable, number_text
from fedjax_het.report.style import add_legend, make_panels
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
    """A panel for each column: the error solid, the length of the gradient dotted; a line a run."""
    from matplotlib.lines import Line2D

    panels = list(dict.fromkeys(panel for panel, _, _ in found))
    figure, axes = make_panels(panels, columns=3, size=(3.6, 2.8), sharey="row")
    for panel, method, curves in found:
        for name, line in (("error", "-"), ("gradient", ":")):
            axis, colour = axes[panel], LOOKS[method]
            axis.plot(curves["round"], curves[name], color=colour, lw=1.2, ls=line)
    for axis in axes.values():
        axis.set_yscale("log")
        axis.set_xlabel("Round", fontsize=10)
        plain_axes(axis)
    handles = [Line2D([], [], color=colour, lw=2, label=row) for row, colour in LOOKS.items()]
    handles += [
        Line2D([], [], color="#444444", ls=line, label=label)
        for line, label in (("-", "error of the gradient"), (":", "gradient of all data"))
    ]
    add_legend(figure, handles)
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
    texts = text_table(table, f"{THEORY.title} Preset {outcome.preset}.")
    return publish(outcome.directory, "theory", texts, table, {"theory.png": draw(found)})


main = program(THEORY, write)

if __name__ == "__main__":
    raise SystemExit(main())
