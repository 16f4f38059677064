"""DynaFed and FSL on top of other methods, each compared with its control.

python experiments/composition.py                  the embedded digits, minutes on 2 cores
python experiments/composition.py --preset cpu     Fashion-MNIST, MLP, 80 clients: an hour

Both papers state that their server's work composes with other methods, and neither shows it. The
methods below are FedAvg, FedProx, SCAFFOLD, FedDyn and MOON; `--methods all` adds FedSAM. Each runs
alone, and as the base of:

* DynaFed fine-tunes on 150 matched samples, with the preset `improved`. Its controls fine-tune
  on 150 samples of noise, and on 150 random real images.
* FSL's server learns from 150 real images. Its control is data sharing: every client trains on
  these images, and the server does not learn. Both have more data than the base; only FSL has
  server learning.
* `levelled` subtracts each class's mean logit over noise images and trains nothing.

The score is the mean test accuracy after the round in which DynaFed synthesizes its data. Tests are
paired t-tests over seeds with Holm's correction over the methods. The table of gains also
tests whether a difference over a method equals the difference over FedAvg.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from fedjax_het.algorithms.dynafed import DynaFedOptions
from fedjax_het.analysis import parse_row
from fedjax_het.analysis.figures.curves import Curve, CurveMetric, plot_curve_panels
from fedjax_het.analysis.overview import BASELINE, get_method_title
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_difference,
    format_mean_std,
    format_p_value,
)
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.papers.table.columns import correct_p_values, run_paired_test

BASES = ("fedavg", "fedprox", "scaffold", "feddyn", "moon")
# Over FedSAM, DynaFed matches a trajectory of sharpness-aware training, the idea of FTD (Du et al.,
# CVPR 2023).
OPTIONAL_BASES = ("fedsam",)
# The method over each base, by the heading of its column.
ADDITIONS = {
    "Alone": "",
    "DynaFed": "dynafed(base={!r}, preset='improved')",
    "Untrained": "dynafed(base={!r}, preset='improved', synthetic='untrained')",
    "Real": "dynafed(base={!r}, preset='improved', synthetic='real')",
    "FSL": "fsl(base={!r})",
    "Data sharing": "data_sharing(base={!r})",
    "Levelled": "levelled(base={!r})",
}
# Differences that are tested.
COMPARISONS = (
    ("DynaFed", "Alone"),
    ("DynaFed", "Untrained"),
    ("DynaFed", "Levelled"),
    ("DynaFed", "Real"),
    ("FSL", "Alone"),
    ("FSL", "Data sharing"),
    ("Levelled", "Alone"),
)
NUM_LAST_ROUNDS = 5
MIN_PAIRS = 3  # seeds of a test
# The best of three values each with seed 7, a factor of 10 apart; of FSL the better of 1 and 5
# (`experiments/ACROSS.md`).
TUNED = {
    "fedprox": {"prox_mu": 0.2},
    "feddyn": {"feddyn_alpha": 0.1},
    "moon": {"moon_mu": 0.1},
    "fsl": {"gamma": 5.0},
}


def name_row(addition: str, base: str) -> str:
    """Return the row of an addition over a base.

    Args:
      addition: heading of the addition's column.
      base: name of the base method.

    Returns:
      The row, as `parse_composed_row` reads it.
    """
    return ADDITIONS[addition].format(base) or base


def parse_composed_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Read a row, with the tuned hyperparameters of its method and its base.

    Args:
      row: the row.
      dataset: name of the data set.

    Returns:
      The method's name, and the settings by name.
    """
    method, variant = parse_row(row)
    base = variant.get("base", method)
    return method, {**TUNED.get(base, {}), **TUNED.get(method, {}), **variant}


def _list_rows(*bases: str) -> tuple[str, ...]:
    return tuple(name_row(addition, base) for base in bases for addition in ADDITIONS)


COMPOSITION = TableDeclaration(
    name="composition",
    paper="dynafed",
    item="composition",
    title="DynaFed and FSL over other methods.",
    has_reported_values=False,
    row_parser=parse_composed_row,
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            alphas=(0.01,),
            seeds=(0, 1),
            rows=_list_rows("fedavg", "scaffold"),
            optional_rows=_list_rows("fedprox", "feddyn", "moon", *OPTIONAL_BASES),
            settings={
                "num_clients": 20,
                "rounds": 20,
                "local_epochs": 5,
                "server_options": {"size": 50},
            },
            method_settings={
                "dynafed": {
                    "options": {"trajectory_rounds": 10, "num_iterations": 50, "num_samples": 50}
                }
            },
        ),
        "cpu": Preset(
            datasets=("fashion_mnist",),
            models=("mlp",),
            alphas=(0.01,),
            seeds=(1, 2, 3),
            rows=_list_rows(*BASES),
            optional_rows=_list_rows(*OPTIONAL_BASES),
            settings={"rounds": 60, "server_options": {"size": 150}},
        ),
    },
)


def collect_curves(table_run: TableRun) -> dict[tuple[str, str], dict[int, np.ndarray]]:
    """Collect test accuracies of the runs that did not diverge.

    Args:
      table_run: the table with its runs.

    Returns:
      By addition and base, the curves in percent by seed, `[rounds]` each.
    """
    curves: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    bases = BASES + OPTIONAL_BASES
    keys = dict(zip(_list_rows(*bases), product(bases, ADDITIONS), strict=True))
    for cell in table_run.cells:
        results = {run.seed: table_run.load_run_result(run) for run in cell.runs}
        base, addition = keys[cell.method]
        curves[addition, base] = {
            seed: 100 * result.metrics["test_accuracy"]
            for seed, result in results.items()
            if result is not None
        }
    return curves


def make_scores_table(
    curves: dict[tuple[str, str], dict[int, np.ndarray]], start: int
) -> pd.DataFrame:
    """Average the accuracies over rounds.

    Args:
      curves: as `collect_curves` returns them.
      start: number of the first rounds that do not count.

    Returns:
      A row per run: `base`, `addition`, `seed`, `mean` of the rounds after `start`, and `last`, the
      mean of the last five rounds.
    """
    return pd.DataFrame(
        [
            {
                "base": base,
                "addition": addition,
                "seed": seed,
                "mean": curve[start:].mean(),
                "last": curve[-NUM_LAST_ROUNDS:].mean(),
            }
            for (addition, base), by_seed in curves.items()
            for seed, curve in by_seed.items()
        ]
    )


def make_gains_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Test the differences of `COMPARISONS`, and whether they are those over FedAvg.

    Args:
      scores: as `make_scores_table` returns it.

    Returns:
      A row per comparison and base: `addition`, `control`, `base`, `mean` and `std` over seeds of
      the difference in points, the number of `seeds`, `p`; and `beyond`, `beyond_std` and
      `beyond_p` of the difference less FedAvg's. The p-values are corrected by Holm's method over
      the bases.
    """
    by_cell = scores.pivot_table(index="seed", columns=["addition", "base"], values="mean")
    bases = scores["base"].unique()
    missing = pd.Series(math.nan, by_cell.index)
    tables = []
    for addition, control in COMPARISONS:
        pairs = {
            base: (by_cell.get((addition, base), missing), by_cell.get((control, base), missing))
            for base in bases
        }
        differences = {base: own - others for base, (own, others) in pairs.items()}
        records = []
        for base, (own, others) in pairs.items():
            gain = run_paired_test(own, others, MIN_PAIRS)
            baseline = missing if base == BASELINE else differences.get(BASELINE, missing)
            beyond = run_paired_test(differences[base], baseline, MIN_PAIRS)
            records.append(
                {"addition": addition, "control": control, "base": base}
                | {"mean": gain.mean, "std": gain.std, "seeds": differences[base].count()}
                | {"p": gain.p_value, "beyond": beyond.mean, "beyond_std": beyond.std}
                | {"beyond_p": beyond.p_value}
            )
        table = pd.DataFrame(records)
        for name in ("p", "beyond_p"):
            table[name] = correct_p_values(table[name].to_numpy())
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def make_text_tables(
    scores: pd.DataFrame, gains: pd.DataFrame, title: str, start: int
) -> tuple[TextTable, TextTable]:
    """Format the accuracies, and the differences with their tests.

    Args:
      scores: as `make_scores_table` returns it.
      gains: as `make_gains_table` returns it.
      title: title of both tables.
      start: number of the first rounds that do not count.

    Returns:
      The table of accuracies and the table of gains.
    """
    sections = []
    periods = {
        "mean": f"rounds from {start + 1}",
        "last": f"last {NUM_LAST_ROUNDS} rounds",
    }
    summary = scores.groupby(["base", "addition"])[[*periods]].agg(["mean", "std"])
    for column, period in periods.items():
        rows = []
        for base in scores["base"].unique():
            row = {"Method": get_method_title(base)}
            for addition in ADDITIONS:
                has_runs = (base, addition) in summary.index
                values = summary.loc[(base, addition), column] if has_runs else (math.nan, math.nan)
                row[addition] = format_mean_std(*values, format_spec=".1f")
            rows.append(row)
        sections.append(TableSection(rows, period, {"Rounds": period}))
    note = (
        "Test accuracy in %, mean ± deviation over seeds. DynaFed: fine-tuning on matched samples; "
        "Untrained and Real: fine-tuning on noise and on random real images. FSL: the server learns "
        "from real images; Data sharing: every client trains on these images instead."
    )
    accuracies = TextTable(title, ["Method"], sections, (note, _describe_tuning()))
    sections = []
    for (addition, control), rows in gains.groupby(["addition", "control"], sort=False):
        texts = [
            {
                "Method": get_method_title(row.base),
                "Difference": format_difference(row.mean, row.std),
                "p (= 0)": format_p_value(row.p),
                "Less FedAvg's": format_difference(row.beyond, row.beyond_std),
                "p (= FedAvg's)": format_p_value(row.beyond_p),
                "Seeds": f"{row.seeds}" if row.seeds else MISSING,
            }
            for row in rows.itertuples(index=False)
        ]
        name = f"{addition} − {control}"
        sections.append(TableSection(texts, name, {"Comparison": name}))
    note = (
        f"Points of the mean accuracy of the rounds from {start + 1}, ± deviation over seeds. p: "
        "two-sided paired t-tests over seeds with Holm's correction over the methods of a section. "
        "A test of three seeds has two degrees of freedom. Less FedAvg's: the difference minus the "
        "difference over FedAvg, by seed."
    )
    return accuracies, TextTable(title, ["Method"], sections, (note,))


def _describe_tuning() -> str:
    values = {name: value for hp in TUNED.values() for name, value in hp.items()}
    return f"Tuned: {', '.join(f'{name} {value:g}' for name, value in values.items())}."


def plot_composition(curves: dict[tuple[str, str], dict[int, np.ndarray]]):
    """Plot the accuracies of DynaFed, FSL, their main controls and each base against the round.

    Args:
      curves: as `collect_curves` returns them.

    Returns:
      A figure with a panel per base.
    """
    lines = []
    for base in dict.fromkeys(base for _, base in curves):
        for addition in ("Alone", "DynaFed", "Untrained", "FSL", "Data sharing"):
            runs = pd.DataFrame(curves.get((addition, base), {}))
            runs.index += 1
            lines.append(Curve(get_method_title(base), addition, addition, runs))
    return plot_curve_panels(lines, columns=3, metric=CurveMetric(window=5), sharey="all")


def _write_outputs(table_run: TableRun) -> Sequence[str]:
    curves = collect_curves(table_run)
    if not any(curves.values()):
        print("There is no run to show.")
        return []
    methods = COMPOSITION.presets[table_run.preset].method_settings
    options = DynaFedOptions.PRESETS["improved"] | methods.get("dynafed", {}).get("options", {})
    start = options["trajectory_rounds"]
    scores = make_scores_table(curves, start)
    gains = make_gains_table(scores)
    accuracies, differences = make_text_tables(scores, gains, f"{table_run.title}.", start)
    figures = {"composition.png": plot_composition(curves)}
    return [
        *table_run.write_table("composition", accuracies, scores, figures),
        *table_run.write_table("composition_gains", differences, gains),
    ]


main = make_table_program(COMPOSITION, _write_outputs)
