"""DynaFed: measures of the synthetic data beside the accuracy of the federation.

python experiments/dynafed/measures.py                  the embedded digits, minutes on 2 cores
python experiments/dynafed/measures.py --preset cpu     Fashion-MNIST, MLP: 15 minutes, and the runs

The runs are runs of `ablation.py`, in its folder. `measures.md` lists `measure_synthetic_data` and
the test accuracy in the 40 rounds after the synthesis, for the matched data of three presets and
both controls of the preset `improved`. Its last row is Spearman's rank correlation between a
measure and this accuracy. The controls are measured with the learned step size of that preset.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedjax_het.algorithms.dynafed import draw_control_data
from fedjax_het.analysis.render import (
    TableSection,
    TextTable,
    format_number,
    format_p_value,
    to_csv,
)
from fedjax_het.analysis.report import write_text
from fedjax_het.analysis.synthetic_measures import (
    build_task,
    load_synthetic_data,
    load_trajectory,
    measure_synthetic_data,
)
from fedjax_het.condensation import SyntheticData
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.papers.dynafed.ablation import ABLATION, BASELINE, MAIN_ROWS
from fedjax_het.papers.dynafed.theory import format_means
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.runtime.results import Result

NUM_NETWORKS = 1
EPOCHS = 150
NUM_PERMUTATIONS = 10_000
ACCURACY = "Rounds after"
NUM_ROUNDS = 40  # after the synthesis, over which the accuracy is averaged
CAPTION = (
    "Means over seeds. J: the data's matching loss, over all starts. Gap: largest logit gap to "
    "training on real data after the last step, in units of the largest change of a logit by "
    "training on real data. Cosine: between the gradients of both data at the starts. Scratch: "
    "accuracy of networks that train on the data alone. IOR, HLR, LRS, ARS: DD-Ranking's scores. "
    "Rounds after: test accuracy of the federation, mean over the 40 rounds after the synthesis. "
    "Rank correlation: Spearman's, between a column and the last column over the rows of a seed, mean "
    "over seeds. p: share of random permutations of the accuracies within seeds with a correlation "
    "that is at least as large."
)
# Columns of the table, with the keys of `measure_runs` and formats.
_COLUMNS = {
    "J": ("matching_loss", ".3f"),
    "Gap": ("relative_logit_gap", ".2f"),
    "Cosine": ("gradient_cosine", "+.3f"),
    "Scratch": ("accuracy", ".1%"),
    "IOR": ("improvement_over_random", "+.1%"),
    "HLR": ("hard_label_recovery", "+.1%"),
    "LRS": ("lrs", ".3f"),
    "ARS": ("ars", ".3f"),
    ACCURACY: ("later_accuracy", ".1%"),
}

ROWS = tuple(row for row in MAIN_ROWS.values() if row != BASELINE)
MEASURES = replace(
    ABLATION,
    name="dynafed-measures",
    results_folder=ABLATION.name,
    title="DynaFed: measures of the synthetic data.",
    presets={
        "quick": replace(ABLATION.presets["quick"], rows=ROWS),
        "cpu": replace(ABLATION.presets["cpu"], rows=ROWS, alphas=(0.01,), seeds=(1, 2, 3)),
    },
)


def build_data(result: Result, kind: str, dataset: Dataset, task: Task) -> SyntheticData:
    """Return the synthetic data of a run or of one of its controls.

    Args:
      result: result of a run with matched data.
      kind: value of the option `synthetic`.
      dataset: data set of the run.
      task: its network and normalization.

    Returns:
      Data with the learned step size of the matched data.
    """
    matched = load_synthetic_data(result, dataset.num_classes)
    if kind == "matched":
        return matched
    args = (len(matched.inputs), dataset, result.spec.resolved().partition_seed)
    images, labels = map(jnp.asarray, draw_control_data(kind == "real", *args))
    images = task.normalize(images) if kind == "real" else images
    return SyntheticData(images, labels, matched.step_size)


class _Measurement:
    """Measures of data of runs with one start; the trajectory is loaded once for each seed."""

    def __init__(self) -> None:
        self.trajectories: dict[tuple, Any] = {}
        self.real_accuracies: dict[tuple, float] = {}

    def measure(self, result: Result, kind: str) -> dict[str, float]:
        """Measure the data of a run with matched data, or of one of its controls."""
        spec = result.spec
        dataset = load_dataset(spec.dataset, normalization=spec.normalization)
        data = build_data(result, kind, dataset, build_task(result, dataset))
        run = (spec.dataset, spec.alpha, spec.seed)  # the first L rounds depend on no more
        if run not in self.trajectories:
            self.trajectories[run] = load_trajectory(result)
        measures = measure_synthetic_data(
            result,
            data=data,
            trajectory=self.trajectories[run],
            num_networks=NUM_NETWORKS,
            epochs=EPOCHS,
            real_accuracy=self.real_accuracies.get(run),
        )
        self.real_accuracies[run] = float(measures.accuracies.real[0])
        return {**measures.summarize(), "step_size": float(data.step_size)}


def measure_runs(
    results: Iterable[tuple[str, Result]], known_rows: pd.DataFrame
) -> Iterator[dict[str, Any]]:
    """Measure the data of all runs: matched data, and the data of both controls.

    Args:
      results: rows of the table and results of runs of DynaFed.
      known_rows: rows of an earlier call, which are not measured again.

    Yields:
      The row, the seed, `SyntheticMeasures.summarize` and `later_accuracy`.
    """

    def get_key(result: Result) -> tuple:
        spec = result.spec
        return spec.dataset, spec.alpha, spec.seed, spec.hp["fine_tune_lr"]

    results, measurement = list(results), _Measurement()
    known = {row["digest"]: row for row in known_rows.to_dict("records")}
    matched: dict[tuple, Result] = {}  # the first run of a key, which controls are measured with
    for _, result in results:
        if result.spec.options["synthetic"] == "matched":
            matched.setdefault(get_key(result), result)
    for method, result in results:
        spec, digest = result.spec, result.digest()
        kind, first = spec.options["synthetic"], spec.options["trajectory_rounds"]
        source = result if kind == "matched" else matched.get(get_key(result))
        if source is None:
            continue
        measures = known.get(digest) or measurement.measure(source, kind)
        later = result.metrics["test_accuracy"][first : first + NUM_ROUNDS]
        yield {
            **measures,
            **{"dataset": spec.dataset, "alpha": spec.alpha, "method": method},
            **{"seed": spec.seed, "digest": digest, "later_accuracy": float(later.mean())},
        }


def correlate_ranks(table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return Spearman's rank correlation of each measure with the accuracy, and its p-value.

    Args:
      table: rows of `measure_runs` of one data set and alpha.

    Returns:
      By column, the mean of the correlations of the seeds, and the share of random permutations of
      the accuracies within seeds with an absolute mean that is at least as large.
    """
    rng, keys = np.random.default_rng(0), [key for key, _ in _COLUMNS.values()]
    rho, random_rho = np.zeros(len(keys)), np.zeros((NUM_PERMUTATIONS, len(keys)))
    groups = [rows[keys].rank().to_numpy() for _, rows in table.groupby("seed")]
    for ranks in groups:
        centered = ranks - ranks.mean(0)
        centered /= np.maximum(np.linalg.norm(centered, axis=0), 1e-12)
        rho += centered[:, -1] @ centered / len(groups)
        accuracies = np.tile(centered[:, -1], (NUM_PERMUTATIONS, 1))
        random_rho += rng.permuted(accuracies, axis=1) @ centered / len(groups)
    p_values = (1 + (np.abs(random_rho) >= np.abs(rho) - 1e-9).sum(0)) / (1 + NUM_PERMUTATIONS)
    return dict(zip(keys, zip(rho.tolist(), p_values.tolist(), strict=True), strict=True))


def make_text_table(table: pd.DataFrame, title: str) -> TextTable:
    """Format means over seeds, with rank correlations.

    Args:
      table: rows of `measure_runs`.
      title: title of the table.

    Returns:
      A section per data set and alpha.
    """
    sections = []
    for (dataset, alpha), rows in table.groupby(["dataset", "alpha"], sort=False):
        texts = format_means(rows, _COLUMNS)
        ranks = correlate_ranks(rows)
        names = {name: ranks[key] for name, (key, _) in _COLUMNS.items() if name != ACCURACY}
        rho = {name: format_number(value, "+.2f") for name, (value, _) in names.items()}
        p_values = {name: format_p_value(value) for name, (_, value) in names.items()}
        empty = {ACCURACY: "", "Seeds": ""}
        texts.append({"Method": "Rank correlation", **rho, **empty})
        texts.append({"Method": "p", **p_values, **empty})
        labels = {"Data": dataset, "alpha": f"{alpha:g}"}
        sections.append(TableSection(texts, f"{dataset}, alpha {alpha:g}", labels))
    return TextTable(title, ["Method"], sections, [CAPTION])


def _write_outputs(table_run: TableRun) -> list[str]:
    path = table_run.directory / "measures.csv"
    known_rows = pd.read_csv(path) if path.exists() else pd.DataFrame()
    results = ((cell.method, result) for cell, result in table_run.iterate_results())
    rows: list[dict[str, Any]] = []
    for row in measure_runs(results, known_rows):
        rows.append(row)
        write_text(path, to_csv(pd.DataFrame(rows)))  # an interrupted program continues from here
    table = pd.DataFrame(rows)
    if table.empty:
        print("There is no run with matched data.")
        return []
    texts = make_text_table(table, f"{table_run.title}.")
    return table_run.write_table("measures", texts, table)


main = make_table_program(MEASURES, _write_outputs)
