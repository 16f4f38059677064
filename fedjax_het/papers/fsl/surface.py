"""FSL's open question: its gain over FedAvg by size and divergence of the server's data.

python experiments/fsl/surface.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/surface.py --preset cpu     all sizes and divergences, five seeds: minutes

The paper's conclusion leaves open how the improvement depends on the size of the server's data and
on their distance from all data. Ten clients have one label each, and the server has examples of c
of them, so that the total variation distance between its labels and all labels is 1 - c / 10. The
control `server only` is SGD on the server's data, with FSL's steps: FSL whose clients have a
learning rate of nearly 0 and whose gamma is larger by the same factor. The control `levelled` is
FedAvg whose server levels the classes without data. All methods start from one random network.
`surface.png`: gains over FedAvg and the controls in percentage points, paired by seed.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedjax_het.analysis import parse_row
from fedjax_het.analysis.figures.style import make_panels
from fedjax_het.analysis.render import TableSection, TextTable, format_number, format_p_value
from fedjax_het.papers.fsl.scenarios import QUICK, SCENARIO1
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.papers.table.columns import correct_p_values, run_paired_test

FROZEN = 1e-4  # factor of the clients' learning rate in `server only`
# The best of 0.05, 0.1 and 0.2 on seed 7; FSL's server had 40 examples of one client.
LEARNING_RATES = {"fedavg": 0.2, "levelled": 0.2, "fsl": 0.1}
CONTROLS = {"fedavg": "FedAvg", "levelled": "levelled", "alone": "server only"}
CAPTION = (
    "Distance: total variation between the labels of the server's data and all labels. Accuracies: "
    "percent, means of the last 20 rounds and over seeds. Gain: of FSL, in points, with the half "
    "width of its 95 % interval over paired seeds. p: two-sided paired t-test, with Holm's "
    "correction over the rows."
)


def _list_rows(clients: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[str, ...]:
    servers = (f"c={c}, n0={size}" for c in clients for size in sizes)
    pairs = ((f"fsl({server})", f"fsl({server}, alone=True)") for server in servers)
    return ("fedavg", "levelled", *(row for pair in pairs for row in pair))


def parse_surface_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Read a row: the server has `n0` examples of `c` clients; `alone` is the control.

    Args:
      row: the row.
      dataset: name of the data set.

    Returns:
      The method's name, and the settings by name.
    """
    method, variant = parse_row(row)
    if "c" in variant:
        clients = variant.pop("c")
        options = {"clients": clients, "per_client": variant.pop("n0") // clients}
        variant |= {"server_data": "clients", "server_options": options}
    if variant.pop("alone", False):
        variant |= {"local_lr": FROZEN * LEARNING_RATES["fsl"], "gamma": 1 / FROZEN}
    return method, variant


SURFACE = replace(
    SCENARIO1,
    name="fsl-surface",
    results_folder="",
    item="surface",
    title="FSL: gain by size and divergence of the server's data.",
    row_parser=parse_surface_row,
    presets={
        "quick": replace(
            QUICK,
            classes=(1,),
            seeds=(0,),
            rows=_list_rows((1, 10), (10, 100)),
            settings={"batch_size": 10, "rounds": 60},
            method_settings={
                name: {"hp": {"local_lr": rate}} | ({"pretrain_epochs": 0} if name == "fsl" else {})
                for name, rate in LEARNING_RATES.items()
            },
        ),
    },
)
SURFACE.presets["cpu"] = replace(
    SURFACE.presets["quick"],
    seeds=(1, 2, 3, 4, 5),
    rows=_list_rows((1, 2, 5, 10), (10, 20, 40, 80, 120)),
)


def collect_accuracies(table_run: TableRun) -> pd.DataFrame:
    """Return a row per seed, number of the server's clients and size.

    Columns are `distance`, `n0`, `seed`, and in percent `fsl` and the names of `CONTROLS`.
    """
    rows = []
    for cell, result in table_run.iterate_results():
        spec, accuracy = result.spec, 100 * result.summary["window_accuracy"]
        name = "alone" if "alone" in parse_row(cell.method)[1] else spec.algorithm
        row = {"seed": spec.seed, "method": name, "accuracy": accuracy}
        if spec.algorithm == "fsl":
            server = result.summary["server"]
            distance = round(server["class_distance"], 6)
            row |= {"distance": distance, "n0": server["num_examples"]}
        rows.append(row)
    if not rows:
        return pd.DataFrame()
    runs = pd.DataFrame(rows)
    has_server = runs["method"].isin(["fsl", "alone"])
    index = ["distance", "n0", "seed"]
    servers = runs[has_server].pivot(index=index, columns="method", values="accuracy")
    others = runs[~has_server].pivot(index="seed", columns="method", values="accuracy")
    table = servers.reset_index().join(others, on="seed")
    return table.reindex(columns=[*index, "fsl", *CONTROLS]).dropna()


def summarize_gains(accuracies: pd.DataFrame) -> pd.DataFrame:
    """Summarize the seeds of each server.

    Args:
      accuracies: as `collect_accuracies` returns it.

    Returns:
      A row per distance and n0 with the means, and for each control the gain of FSL `gain_NAME`,
      the half width of its interval `width_NAME` and its p-value `p_NAME`.
    """
    rows = []
    for (distance, size), runs in accuracies.groupby(["distance", "n0"]):
        row = {"distance": distance, "n0": int(size), "seeds": len(runs)}
        row |= runs[["fsl", *CONTROLS]].mean()
        for name in CONTROLS:
            test = run_paired_test(runs["fsl"], runs[name], min_pairs=2)
            row |= {f"gain_{name}": test.mean, f"width_{name}": test.half_width}
            row[f"p_{name}"] = test.p_value
        rows.append(row)
    summary = pd.DataFrame(rows)
    for name in CONTROLS:
        summary[f"p_{name}"] = correct_p_values(summary[f"p_{name}"].to_numpy())
    return summary


def make_text_table(summary: pd.DataFrame, title: str) -> TextTable:
    """Format the summary.

    Args:
      summary: as `summarize_gains` returns it.
      title: title of the table.

    Returns:
      The table.
    """
    texts = []
    for row in summary.to_dict("records"):
        text = {"Distance": f"{row['distance']:g}", "n_0": f"{row['n0']}"}
        names = {"fsl": "FSL", **CONTROLS}
        text |= {label: f"{row[name]:.1f}" for name, label in names.items()}
        for name, label in CONTROLS.items():
            width = format_number(row[f"width_{name}"], ".1f")
            text[f"over {label}"] = f"{row[f'gain_{name}']:+.1f} ± {width}"
            text[f"p, {label}"] = format_p_value(row[f"p_{name}"])
        texts.append(text)
    return TextTable(title, ["Distance", "n_0"], [TableSection(texts)], [CAPTION])


def plot_surface(summary: pd.DataFrame):
    """Plot the gains over the controls, a cell per size and distance.

    Args:
      summary: as `summarize_gains` returns it.

    Returns:
      The figure; `ns` marks gains whose p-value is 0.05 or more, or missing.
    """
    titles = [f"FSL over {label}" for label in CONTROLS.values()]
    figure, panels = make_panels(titles, columns=3, size=(3.7, 3.0), sharey="all")
    limit = summary[[f"gain_{name}" for name in CONTROLS]].abs().to_numpy().max()
    for name, panel in zip(CONTROLS, panels.values(), strict=True):
        gains, p_values = (
            summary.pivot(index="distance", columns="n0", values=f"{prefix}_{name}")
            for prefix in ("gain", "p")
        )
        image = panel.imshow(gains, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
        for (y, x), gain in np.ndenumerate(gains.to_numpy()):
            if not math.isnan(gain):
                mark = "" if p_values.to_numpy()[y, x] < 0.05 else "\nns"
                color = "white" if abs(gain) > 0.6 * limit else "black"
                style: Any = {"ha": "center", "va": "center", "color": color, "fontsize": 8}
                panel.text(x, y, f"{gain:+.1f}{mark}", **style)
        panel.set_xticks(range(gains.shape[1]), [f"{size:g}" for size in gains.columns])
        panel.set_yticks(range(gains.shape[0]), [f"{value:g}" for value in gains.index])
        panel.set_xlabel("examples of the server, n_0", fontsize=10)
    next(iter(panels.values())).set_ylabel("total variation distance", fontsize=10)
    figure.colorbar(image, ax=list(panels.values()), label="percentage points")
    return figure


def _write_outputs(table_run: TableRun) -> list[str]:
    accuracies = collect_accuracies(table_run)
    if not len(accuracies):
        print("There is no run to draw.")
        return []
    summary = summarize_gains(accuracies)
    texts = make_text_table(summary, f"{table_run.title}.")
    return table_run.write_table("surface", texts, summary, {"surface.png": plot_surface(summary)})


main = make_table_program(SURFACE, _write_outputs)
