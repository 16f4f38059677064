"""FedAMP's self weight and clients that drop out: two measurements beside the paper's tables.

python experiments/fedamp/robustness.py                  the embedded digits, a minute on 2 cores
python experiments/fedamp/robustness.py --preset short   Fashion-MNIST, MLP, 15 clients: 20 minutes

The paper calls xi_ii of Eq. 8 a hyperparameter and prints no values; its study of robustness is in
an appendix that was not available. `robustness_weight` has HeurFedAMP by its self weight, beside
methods without one. `robustness_offline` has methods by the fraction of clients that are offline in
a round: the server mixes the last models of offline clients, which do not train, and all clients
are tested. Both tables test each row's differences from two controls over paired seeds.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd

from fedjax_het.analysis import plot_metric_vs_setting
from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.overview import is_diverged
from fedjax_het.analysis.render import TableSection, TextTable, format_mean_std, format_number
from fedjax_het.papers.fedamp.tables import TABLE3
from fedjax_het.papers.table import Preset, TableRun, make_table_program
from fedjax_het.papers.table.columns import correct_p_values, run_paired_test

CONTROLS = ("separate", "fedavg_ft")
SELF_WEIGHTS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
PARTICIPATIONS = (1.0, 0.5, 0.2)
METHODS = (*CONTROLS, "fedamp", "heurfedamp")
RECEIVED = "heurfedamp(client_test_model='received')"
CAPTION = (
    "BMTA: best mean test accuracy of clients in percent, mean ± standard deviation over seeds. "
    "Differences from a control of the same seeds and setting, in points, with the p-value of a "
    "two-sided paired t-test and Holm's correction over the rows of a column."
)


def _make_presets(rows: Sequence[str]) -> dict[str, Preset]:
    return {
        "quick": replace(TABLE3.presets["quick"], rows=tuple(rows)),
        "short": replace(
            TABLE3.presets["short"],
            rows=tuple(rows),
            datasets=("fashion_mnist",),
            seeds=(1, 2, 3, 4, 5),
            settings={**TABLE3.presets["short"].settings, "num_clients": 15},
        ),
    }


WEIGHT = replace(
    TABLE3,
    name="fedamp-robustness",
    results_folder="fedamp-robustness",
    item="weight",
    title="HeurFedAMP by its self weight, clients in groups.",
    has_reported_values=False,
    main_method="",
    presets=_make_presets(
        [*METHODS[:-1], *(f"heurfedamp(self_weight={weight})" for weight in SELF_WEIGHTS)]
    ),
)
OFFLINE = replace(
    WEIGHT,
    item="offline",
    title="FedAMP by the fraction of clients offline in a round, clients in groups.",
    presets=_make_presets(
        [
            *(f"{name}(participation={p})" for p, name in product(PARTICIPATIONS, METHODS)),
            *(f"{RECEIVED[:-1]}, participation={p})" for p in PARTICIPATIONS),
        ]
    ),
)


def compare_with_controls(results: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Compare the BMTA of methods at each value of a setting with the controls' BMTA.

    Args:
      results: runs, as `load_results` returns them; diverged ones are left out.
      setting: column of the setting; a control without it is compared at all values.

    Returns:
      A row per method and value: `mean`, `std` and `worst_decile` in percent, `seeds`; `minus_X`
      and `p_X` for each control X.
    """
    is_received = results.get("client_test_model", pd.Series(index=results.index)) == "received"
    results = results.assign(method=results["algorithm"].mask(is_received, RECEIVED))
    results, order = results[~is_diverged(results)], (*METHODS, RECEIVED)
    groups = {
        (method, value): 100 * runs.set_index("seed")[["bmta", "bmta_worst_decile"]]
        for (method, value), runs in results.fillna({setting: np.inf}).groupby(["method", setting])
    }
    rows = []
    for method, value in sorted(groups, key=lambda key: (order.index(key[0]), key[1])):
        bmta = groups[method, value]["bmta"]
        row = {"method": method, setting: value, "mean": bmta.mean(), "std": bmta.std()}
        row["worst_decile"] = groups[method, value]["bmta_worst_decile"].mean()
        for control in CONTROLS:
            own = groups.get((control, value), groups.get((control, np.inf)))
            values = pd.Series(dtype=float) if own is None or method == control else own["bmta"]
            test = run_paired_test(bmta, values)
            row |= {f"minus_{control}": test.mean, f"p_{control}": test.p_value}
        rows.append({**row, "seeds": len(bmta)})
    table = pd.DataFrame(rows).replace({setting: {np.inf: np.nan}})
    for control in CONTROLS:
        table[f"p_{control}"] = correct_p_values(table[f"p_{control}"].to_numpy())
    return table


def make_text_table(table: pd.DataFrame, setting: str, label: str, title: str) -> TextTable:
    """Format the comparison of `compare_with_controls`.

    Args:
      table: the comparison.
      setting: column of the setting.
      label: heading of the setting.
      title: title of the table.

    Returns:
      A row per method and value.
    """
    texts = []
    for row in table.to_dict("records"):
        text = {
            "Method": format_row(row["method"]),
            label: format_number(row[setting], "g"),
            "BMTA": format_mean_std(row["mean"], row["std"]),
            "Worst decile": format_number(row["worst_decile"]),
        }
        for name in CONTROLS:
            text[f"Minus {format_row(name)}"] = format_number(row[f"minus_{name}"], "+.2f")
            text[f"p, {format_row(name)}"] = format_number(row[f"p_{name}"], ".2g")
        texts.append({**text, "Seeds": str(row["seeds"])})
    return TextTable(title, ["Method", label], [TableSection(texts)], [CAPTION, TABLE3.note])


def _write_outputs(table_run: TableRun, *, setting: str, label: str) -> list[str]:
    results = table_run.cell_results
    if not len(results):
        print("There is no run to draw.")
        return []
    table = compare_with_controls(results, setting)
    texts = make_text_table(table, setting, label, f"{table_run.title}.")
    lines = results[results[setting].notna()]
    by = [name for name in ("algorithm", "client_test_model") if name in lines]
    figure = plot_metric_vs_setting(lines, x=setting, by=by, metrics=("bmta",))
    (panel,) = figure.axes
    panel.set_xlabel(label)
    constant = table[table[setting].isna()]
    bottom, top = panel.get_ylim()
    panel.set_ylim(min([bottom, *constant["mean"] - 0.5]), max([top, *constant["mean"] + 0.7]))
    for row in constant.itertuples():
        panel.axhline(row.mean, color="#666666", lw=0.9, ls="--")
        text = panel.text(0.02, row.mean, format_row(row.method), va="bottom", fontsize=8)
        text.set_transform(panel.get_yaxis_transform())
    name = f"robustness_{table_run.experiment.item}"
    return table_run.write_table(name, texts, table, {f"{name}.png": figure})


weight = make_table_program(
    WEIGHT, partial(_write_outputs, setting="hp.self_weight", label="Self weight")
)
offline = make_table_program(
    OFFLINE, partial(_write_outputs, setting="participation", label="Clients online")
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run both programs with the same flags.

    Args:
      argv: command line after the program's name; default: `sys.argv`.

    Returns:
      Exit status of the first program that fails, or 0.
    """
    return weight(argv) or offline(argv)
