"""The share of each setting of DynaFed's synthesis and fine-tuning in its gain, with controls.

python experiments/dynafed/ablation.py                   the embedded digits, minutes on 2 cores
python experiments/dynafed/ablation.py --preset cpu      Fashion-MNIST, MLP: the main rows
python experiments/dynafed/ablation.py --preset settings Fashion-MNIST, MLP: all rows
python experiments/dynafed/ablation.py --preset convnet  the main rows, ConvNet of width 16

The main rows are FedAvg, DynaFed with the preset `improved`, and its two controls: the same
fine-tuning on untrained data and on as many random real images. Each further row changes one
setting of the preset. Differences are from the preset, paired by seed. The share is the gain over
FedAvg divided by the gain of the preset's control with real images.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedjax_het.analysis.figures.curves import Curve, CurveMetric, plot_curve_panels
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_difference,
    format_mean_std,
    format_number,
    format_p_value,
)
from fedjax_het.papers.dynafed.settings import QUICK
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.papers.table.columns import correct_p_values, run_paired_test

IMPROVED = "dynafed(preset='improved')"
REAL = "dynafed(preset='improved', synthetic='real')"
BASELINE = "fedavg"
MIN_PAIRS = 3  # seeds of a test
MAIN_ROWS = {
    "FedAvg": BASELINE,
    "Preset improved": IMPROVED,
    "Control: untrained data": "dynafed(preset='improved', synthetic='untrained')",
    "Control: real images": REAL,
    "Preset paper": "dynafed(preset='paper')",
    "Preset code": "dynafed(preset='code')",
}
# One setting each that differs from the preset, by the name of the row.
CHANGES: dict[str, dict[str, Any]] = {
    "Differentiation exact": {"differentiation": "exact"},
    "Step size as in `paper`": {"step_size": 0.04, "step_size_lr": 1e-5},
    "Momentum 0.9": {"inner_momentum": 0.9, "step_size": 0.1},
    "Undivided loss": {"loss_scaling": "cross_entropy", "step_size": 0.04, "step_size_lr": 1e-4},
    "40 inner steps": {"inner_steps": 40},
    "3,000 iterations": {"num_iterations": 3000},
    "Image rate 0.01": {"image_lr": 0.01},
    "No augmentation": {"augment_strategy": "none"},
    "Target: mean of 9 rounds": {"segment_length": 10, "target_counts": (8,)},
    "Target: moving average": {"path": "average", "path_decay": 0.8, "starts": "rounds"},
    "Target: straight line": {"path": "line", "starts": "rounds"},
    "Starts from round 10": {"min_start": 10},
    "Starts: growing window": {"initial_max_start": 3},
    "Trajectory of 40 rounds": {"trajectory_rounds": 40},
    "4 syntheses": {"max_syntheses": 4, "synthesis_interval": 40},
    "Fine-tuning 1e-4": {"fine_tune_lr": 1e-4},
    "Fine-tuning 1e-3": {"fine_tune_lr": 1e-3},
    "Fine-tuning 1e-3, proximal": {"fine_tune_lr": 1e-3, "fine_tune_prox": 0.1},
    "Fine-tuning decays": {"fine_tune_lr_decay": 0.99},
    "Half the average": {"fine_tune_mix": 0.5},
    "Hard labels": {"label_init": 20.0, "label_lr": 0.0},
    "Labels only": {"image_lr": 0.0},
    "Images only": {"label_init": 3.0, "label_lr": 0.0},
}


def _format_row(changes: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    return f"dynafed(preset='improved', {settings})"


ROWS = MAIN_ROWS | {name: _format_row(changes) for name, changes in CHANGES.items()}
_NAMES = {row: name for name, row in ROWS.items()}
_FASHION_MNIST: dict[str, Any] = {
    "datasets": ("fashion_mnist",),
    "models": ("mlp",),
    "alphas": (0.01, 0.04),
    "seeds": (1, 2, 3, 4, 5),
}
ABLATION = TableDeclaration(
    name="dynafed-ablation",
    paper="dynafed",
    item="ablation",
    title="DynaFed: settings of synthesis and fine-tuning.",
    has_reported_values=False,
    row_display_names=_NAMES,
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            alphas=(0.01,),
            seeds=(0, 1),
            rows=tuple(ROWS.values()),
            settings={**QUICK.settings, "rounds": 60},
            method_settings={"dynafed": {"options": {"num_iterations": 50}}},
        ),
        "cpu": Preset(**_FASHION_MNIST, rows=tuple(MAIN_ROWS.values())),
        "settings": Preset(**{**_FASHION_MNIST, "alphas": (0.01,)}, rows=tuple(ROWS.values())),
        "convnet": Preset(
            datasets=("fashion_mnist", "cifar10"),
            models=("convnet",),
            alphas=(0.01,),
            seeds=(1,),
            rows=tuple(MAIN_ROWS.values())[:4],
            model_settings={"convnet": {"width": 16}},
            settings={"rounds": 100},
            description="width 16, 100 rounds",
        ),
    },
)
"""Declaration of the table. Learning rates and settings were chosen with seeds 7 and 8."""


def summarize_cells(table_run: TableRun) -> pd.DataFrame:
    """Average the accuracies over two periods, and compare them with the preset `improved`.

    Args:
      table_run: the table with its runs.

    Returns:
      A row per cell with runs: `row`, `column` (data set, network and alpha), `early` and `late`,
      means over seeds in percent of the first 40 rounds with synthetic data of the preset and of
      the second half of the rounds; `late_std`; `difference` of `late` from the preset, with
      `half_width` of its interval and `p`, corrected by Holm's method over the column; `share`,
      of the gain of real images on the seeds of the row; means of the matching loss `J` and of the
      final `step_size`; median `seconds` of a run; `seeds`.
    """
    frames, records = {}, []
    for cell in table_run.cells:
        runs = {run.seed: table_run.load_run_result(run) for run in cell.runs}
        results = {seed: result for seed, result in runs.items() if result is not None}
        if not results:
            continue
        curves = {s: 100 * result.metrics["test_accuracy"] for s, result in results.items()}
        late = pd.Series({seed: curve[len(curve) // 2 :].mean() for seed, curve in curves.items()})
        frames[cell.column_key, cell.method] = late
        summaries = pd.DataFrame([result.summary for result in results.values()])
        records.append(
            {
                "column_key": cell.column_key,
                "column": cell.column_label,
                "row": cell.method,
                "early": np.mean([curve[20:60].mean() for curve in curves.values()]),
                "late": late.mean(),
                "late_std": late.std(),
                "J": _average(summaries, "matching_loss"),
                "step_size": _average(summaries, "synthesis_step_size"),
                "seconds": float(summaries["wall_seconds"].median()),
                "seeds": len(results),
                **dict.fromkeys(("difference", "half_width", "p", "share"), np.nan),
            }
        )
    table = pd.DataFrame(records)
    if not records:
        return table
    for index, row in table.iterrows():
        column, late = row["column_key"], frames[row["column_key"], row["row"]]
        if row["row"] != IMPROVED and (column, IMPROVED) in frames:
            test = run_paired_test(late, frames[column, IMPROVED], MIN_PAIRS)
            names = ["difference", "half_width", "p"]
            table.loc[index, names] = test.mean, test.half_width, test.p_value
        if {(column, BASELINE), (column, REAL)} <= set(frames):
            gains = late - frames[column, BASELINE], frames[column, REAL] - frames[column, BASELINE]
            gain, real_gain = pd.concat(gains, axis=1, join="inner").dropna().mean()
            table.loc[index, "share"] = gain / real_gain
    for _, rows in table.groupby("column"):
        table.loc[rows.index, "p"] = correct_p_values(rows["p"].to_numpy())
    return table.drop(columns="column_key")


def _average(summaries: pd.DataFrame, name: str) -> float:
    values = summaries[name] if name in summaries else pd.Series(dtype=float)
    return float(pd.to_numeric(values).mean())


def make_text_table(table: pd.DataFrame, title: str) -> TextTable:
    """Format the summary of `summarize_cells`.

    Args:
      table: the summary.
      title: title of the table.

    Returns:
      The table, with a section per data set, network and alpha.
    """
    sections = []
    for column, rows in table.groupby("column", sort=False):
        texts = [
            {
                "Setting": _NAMES[row.row],
                "Rounds 21-60": format_number(row.early, ".1f"),
                "Second half": format_mean_std(row.late, row.late_std, format_spec=".1f"),
                "Difference": format_difference(row.difference, row.half_width),
                "p": format_p_value(row.p),
                "Share": MISSING if np.isnan(row.share) else f"{100 * row.share:.0f} %",
                "J": format_number(row.J, ".3f"),
                "Step size": format_number(row.step_size, ".3g"),
                "Seconds": format_number(row.seconds, ".0f"),
                "Seeds": f"{row.seeds}",
            }
            for row in rows.itertuples(index=False)
        ]
        sections.append(TableSection(texts, str(column), {"Column": str(column)}))
    note = (
        "Test accuracy in %, means over rounds ± deviation over seeds. Difference: second half less "
        "the preset's, with half its 95 % confidence interval. p: two-sided paired t-test over seeds, "
        "from three seeds, with Holm's correction over the rows. Share: gain over FedAvg, divided by "
        "the gain of the real images on equal seeds. J: matching loss in the last fifth of the "
        "iterations. Seconds: median of the runs; other programs on the machine lengthen them."
    )
    return TextTable(title, ["Setting"], sections, (note,), ("Seeds", "Step size", "Seconds"))


def plot_main_rows(table_run: TableRun):
    """Plot the accuracies of the main rows against the round, means over seeds.

    Args:
      table_run: the table with its runs.

    Returns:
      A figure with a panel per data set, network and alpha.
    """
    runs: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for cell, result in table_run.iterate_results():
        if cell.method in MAIN_ROWS.values():
            accuracies = runs.setdefault((cell.column_label, cell.method), {})
            accuracies[result.spec.seed] = 100 * result.metrics["test_accuracy"]
    curves = []
    for (column, row), accuracies in runs.items():
        frame = pd.DataFrame(accuracies)
        frame.index += 1
        curves.append(Curve(column, _NAMES[row], _NAMES[row], frame))
    return plot_curve_panels(curves, columns=2, metric=CurveMetric(window=5), sharey="all")


def _write_outputs(table_run: TableRun) -> list[str]:
    table = summarize_cells(table_run)
    if not len(table):
        print("There is no run to show.")
        return []
    text = make_text_table(table, f"{table_run.title}.")
    figures = {"ablation_curves.png": plot_main_rows(table_run)}
    return table_run.write_table("ablation", text, table, figures)


main = make_table_program(ABLATION, _write_outputs)
