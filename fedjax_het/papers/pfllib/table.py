"""PFLlib's leaderboard on Fashion-MNIST, with fine-tuned FedAvg, which it leaves out.

python experiments/pfllib/table.py                   the embedded digits, a minute on 2 cores
python experiments/pfllib/table.py --preset tuning   learning rates for cpu: 2 hours on one core
python experiments/pfllib/table.py --preset cpu      a twentieth of the images: 7 hours on one core
python experiments/pfllib/table.py --preset paper    all images, 2,000 rounds: a GPU's work

Rows are the leaderboard's methods that the package has, then Separate, LG-FedAvg and fine-tuned
FedAvg and FedProx. There are two settings: `pathological_unequal` (two classes for each client, in
parts of unequal size) and Dirichlet 0.1. Accuracies are pooled over the tests of all clients. The
last table tests the differences from fine-tuned FedAvg, paired over seeds.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis import parse_row
from fedjax_het.analysis.comparison import add_row_settings
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_difference,
    format_mean_std,
    format_number,
    format_p_value,
)
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import (
    Preset,
    TableDeclaration,
    TableRun,
    list_protocol_deviations,
    make_table_program,
)
from fedjax_het.papers.table.columns import correct_p_values, run_paired_test
from fedjax_het.tuning.tuner import TUNING_SEED

PARTITIONS = {
    "pathological_unequal": "two classes per client",
    "dirichlet_capped": "Dirichlet 0.1",
}
REFERENCE = "fedavg_ft"  # row of the claim that is tested
# Rows that the leaderboard leaves out.
ADDED_METHODS = ("separate", "lg_fedavg", "fedavg_ft", "fedprox_ft")
METHOD_ROWS = tuple(
    method
    for method in dict.fromkeys((*load_reported_values("pfllib")["method"], *ADDED_METHODS))
    if method in METHODS.built_in
)
QUICK_METHODS = ("fedavg", "fedper", "separate", "fedavg_ft")
MIN_PAIRS = 3  # seeds of a test
# All methods have one budget: three learning rates, one run each with a seed that is not reported.
# A run of the preset `cpu` has a 200th of the steps of PFLlib's runs: rates are larger than 0.005.
LEARNING_RATES = (0.02, 0.06, 0.2)
# The rates of `choose_learning_rates` for the preset `tuning`, by partition and method.
TUNED: dict[str, dict[str, float]] = {
    "pathological_unequal": {
        "fedavg": 0.06,
        "fedprox": 0.06,
        "fedgen": 0.06,
        "per_fedavg": 0.06,
        "pfedme": 0.2,
        "ditto": 0.02,
        "apfl": 0.02,
        "fedamp": 0.06,
        "fedala": 0.06,
        "fedper": 0.06,
        "fedrep": 0.06,
        "fedrod": 0.06,
        "fedbabu": 0.02,
        "fedproto": 0.06,
        "separate": 0.06,
        "lg_fedavg": 0.06,
        "fedavg_ft": 0.02,
        "fedprox_ft": 0.02,
    },
    "dirichlet_capped": {
        "fedavg": 0.06,
        "fedprox": 0.06,
        "fedgen": 0.06,
        "per_fedavg": 0.06,
        "pfedme": 0.06,
        "ditto": 0.06,
        "apfl": 0.06,
        "fedamp": 0.06,
        "fedala": 0.06,
        "fedper": 0.06,
        "fedrep": 0.06,
        "fedrod": 0.2,
        "fedbabu": 0.06,
        "fedproto": 0.06,
        "separate": 0.06,
        "lg_fedavg": 0.06,
        "fedavg_ft": 0.06,
        "fedprox_ft": 0.06,
    },
}
# PFLlib tests every round, which would make fine-tuning five times as expensive as training.
EVAL_EVERY = 10


def name_row(method: str, partition: str, **settings: Any) -> str:
    """Return the row of a method in one setting.

    Args:
      method: name of the method.
      partition: name of the partition.
      **settings: further settings of the row.

    Returns:
      The row, as `parse_row` reads it.
    """
    return add_row_settings(method, partition=partition, **settings)


def parse_leaderboard_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Read a row; Per-FedAvg's inner step has the row's learning rate, as in PFLlib.

    Args:
      row: the row.
      dataset: name of the data set.

    Returns:
      The method's name, and the settings by name.
    """
    method, settings = parse_row(row)
    if method == "per_fedavg" and "local_lr" in settings:
        settings["inner_lr"] = settings["local_lr"]
    return method, settings


def _list_rows(methods: Sequence[str], **settings: Any) -> tuple[str, ...]:
    return tuple(
        name_row(method, partition, **settings)
        for partition, method in product(PARTITIONS, methods)
    )


def _list_tuned_rows() -> tuple[str, ...]:
    default = LEARNING_RATES[len(LEARNING_RATES) // 2]
    return tuple(
        name_row(method, partition, local_lr=TUNED[partition].get(method, default))
        for partition, method in product(PARTITIONS, METHOD_ROWS)
    )


CPU = Preset(
    datasets=("fashion_mnist_twentieth",),
    models=("cnn",),
    seeds=(1, 2, 3),
    rows=_list_tuned_rows(),
    settings={"rounds": 200, "eval_every": EVAL_EVERY},
    method_settings={"fedgen": {"options": {"generator_steps": 50}}},
    description="a twentieth of the images, 200 rounds",
)
LEADERBOARD = TableDeclaration(
    name="pfllib",
    paper="pfllib",
    item="table",
    title="PFLlib's leaderboard.",
    row_parser=parse_leaderboard_row,
    settings={"metrics": "pooled_accuracy", "partition_options": {"min_size": 30}},
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            seeds=(0, 1, 2),
            rows=_list_rows(QUICK_METHODS),
            optional_rows=_list_rows([row for row in METHOD_ROWS if row not in QUICK_METHODS]),
            settings={
                "rounds": 10,
                "eval_every": 5,
                "partition_options": {"min_size": 5},
                "hp": {"local_lr": 0.1},
            },
            method_settings={"fedgen": {"options": {"generator_steps": 10}}},
        ),
        "cpu": CPU,
        "tuning": dataclasses.replace(
            CPU,
            seeds=(TUNING_SEED,),
            settings={**CPU.settings, "rounds": 50},
            description="a twentieth of the images, 50 rounds",
            rows=tuple(
                row for lr in LEARNING_RATES for row in _list_rows(METHOD_ROWS, local_lr=lr)
            ),
        ),
        "paper": Preset(
            datasets=("fashion_mnist_pooled",),
            models=("cnn",),
            seeds=(1, 2, 3),
            rows=_list_rows(METHOD_ROWS),
            settings={"eval_every": EVAL_EVERY},
        ),
    },
)


class RunScores(NamedTuple):
    """Accuracies of one run in percent, pooled over the clients' tests."""

    partition: str
    method: str
    local_lr: float
    seed: int
    best: float
    "Accuracy of the tested model in its best round."
    last: float
    "Accuracy of the tested model after the last round."
    global_best: float
    "Accuracy of the global model in its best round; NaN for a method without one."
    global_last: float
    "Accuracy of the global model after the last round."


def make_scores_table(table_run: TableRun) -> pd.DataFrame:
    """Collect the accuracies of the runs that did not diverge.

    The clients' tests together are the whole test split. The accuracy of the global model on it
    therefore equals the pooled accuracy of the global model on the clients' tests.

    Args:
      table_run: the table with its runs.

    Returns:
      A row per run with the columns of `RunScores`.
    """
    records = []
    for cell, result in table_run.iterate_results():
        method, settings = parse_row(cell.method)
        run = result.spec.resolved()
        pooled = 100 * result.metrics["pooled_client_accuracy"]
        accuracy = 100 * result.metrics["test_accuracy"]
        scores = (_find_best(pooled), pooled[-1], _find_best(accuracy), accuracy[-1])
        identity = (settings["partition"], method, run.hyperparameters["local_lr"], run.seed)
        records.append(RunScores(*identity, *scores))
    return pd.DataFrame(records, columns=list(RunScores._fields))


def _find_best(curve: np.ndarray) -> float:
    measured = curve[np.isfinite(curve)]
    return float(measured.max()) if len(measured) else math.nan


def make_gains_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Test the differences of all rows from fine-tuned FedAvg.

    Args:
      scores: as `make_scores_table` returns it.

    Returns:
      A row per partition and method: for the accuracies `best` and `last`, the mean difference in
      points over seeds, half the width of its 95 % confidence interval (`_half_width`), and the
      p-value of a paired t-test (`_p`), corrected by Holm's method over the rows of a partition;
      and the number of `seeds`.
    """
    tables = []
    for partition, group in scores.groupby("partition", sort=False):
        by_seed = group.pivot_table(
            index="seed", columns="method", values=["best", "last"], dropna=False
        )
        if REFERENCE not in by_seed["best"]:
            continue
        methods = [name for name in group["method"].unique() if name != REFERENCE]
        records = []
        for method in methods:
            record = {"partition": partition, "method": method}
            for score in ("best", "last"):
                pair = by_seed[score][method], by_seed[score][REFERENCE]
                test = run_paired_test(*pair, MIN_PAIRS)
                record |= {score: test.mean, f"{score}_half_width": test.half_width}
                record |= {f"{score}_p": test.p_value, "seeds": (pair[0] - pair[1]).count()}
            records.append(record)
        table = pd.DataFrame(records)
        for name in ("best_p", "last_p") if records else ():
            table[name] = correct_p_values(table[name].to_numpy())
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def make_accuracies_text(
    scores: pd.DataFrame, reported: pd.DataFrame, title: str, notes: Sequence[str] = ()
) -> TextTable:
    """Format the accuracies beside the reported values.

    Args:
      scores: as `make_scores_table` returns it.
      reported: as `load_reported_values` returns it; empty without values for the data set.
      title: title of the table.
      notes: further notes.

    Returns:
      A section per partition with a row per method.
    """
    reported = reported.set_index(["partition", "method"])
    sections = []
    for partition, group in scores.groupby("partition", sort=False):
        rows = []
        for method, runs in group.groupby("method", sort=False):
            values = {name: (runs[name].mean(), runs[name].std()) for name in RunScores._fields[4:]}
            texts = {
                name: format_mean_std(*pair, format_spec=".2f") for name, pair in values.items()
            }
            published, difference = MISSING, MISSING
            if (partition, method) in reported.index:
                mean, std = reported.loc[(partition, method), ["mean", "std"]]
                published = format_mean_std(mean, std, format_spec=".2f")
                difference = format_number(values["best"][0] - mean, "+.2f")
            rates = sorted(runs["local_lr"].unique())
            row = {"Method": get_method_title(method), "Best": texts["best"], "Last": texts["last"]}
            row |= {"Global, best": texts["global_best"], "Global, last": texts["global_last"]}
            row |= {"Reported": published, "Difference": difference}
            row |= {"lr": ", ".join(f"{rate:g}" for rate in rates), "Seeds": f"{len(runs)}"}
            rows.append(row)
        name = PARTITIONS[str(partition)]
        sections.append(TableSection(rows, name, {"Setting": name}))
    note = (
        "Test accuracy in %, pooled over the clients' tests, mean ± deviation over seeds. Best: the "
        "evaluated round where it is highest, selected on the tests as in PFLlib. Global: the "
        "server's model, before any training at the client. The tested model of FedAvg, FedProx "
        "and FedGen is the global model. Lines of progress have the mean over clients instead, in "
        "which a small test counts as much as a large one."
    )
    return TextTable(title, ["Method"], sections, (note, *notes))


def make_gains_text(gains: pd.DataFrame, title: str) -> TextTable:
    """Format the differences from fine-tuned FedAvg with their tests.

    Args:
      gains: as `make_gains_table` returns it.
      title: title of the table.

    Returns:
      A section per partition with a row per method.
    """
    sections = []
    for partition, group in gains.groupby("partition", sort=False):
        rows = [
            {
                "Method": get_method_title(row.method),
                "Best": format_difference(row.best, row.best_half_width),
                "p (best)": format_p_value(row.best_p),
                "Last": format_difference(row.last, row.last_half_width),
                "p (last)": format_p_value(row.last_p),
                "Seeds": f"{row.seeds}",
            }
            for row in group.itertuples(index=False)
        ]
        name = PARTITIONS[str(partition)]
        sections.append(TableSection(rows, name, {"Setting": name}))
    note = (
        f"Points above {get_method_title(REFERENCE)}, mean over seeds ± half the width of the 95 % "
        "confidence interval, of the best and the last accuracy. p: two-sided paired t-tests over "
        f"seeds with Holm's correction over the rows of a section, from {MIN_PAIRS} seeds. The "
        "intervals are not corrected."
    )
    return TextTable(title, ["Method"], sections, (note,))


def choose_learning_rates(scores: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Choose the learning rate with the best accuracy of the tested model for each row.

    A rate at which a run of the method diverges in either setting is left out of both settings,
    since such a rate is too large for some seeds.

    Args:
      scores: as `make_scores_table` returns it, of the preset `tuning`.

    Returns:
      The rate by partition and method, as `TUNED` has it.
    """
    chosen: dict[str, dict[str, float]] = {}
    num_runs = len(scores[["partition", "seed"]].drop_duplicates())
    finished = scores.groupby(["method", "local_lr"])["best"].transform("count")
    scores = scores[finished == num_runs]
    means = scores.groupby(["partition", "method", "local_lr"], sort=False)["best"].mean()
    for (partition, method), values in means.groupby(["partition", "method"], sort=False):
        chosen.setdefault(partition, {})[method] = float(values.idxmax()[2])
    return chosen


def _write_outputs(table_run: TableRun) -> Sequence[str]:
    scores = make_scores_table(table_run)
    if not len(scores):
        print("There is no run to show.")
        return []
    deviations = list_protocol_deviations(table_run.experiment, table_run.cells)
    notes = [f"Settings that differ from protocol pfllib: {'; '.join(deviations)}."]
    has_reported = "digits" not in {cell.dataset for cell in table_run.cells}
    reported = table_run.reported if has_reported else table_run.reported.head(0)
    if table_run.preset == "tuning":
        title = f"{table_run.title}. Best accuracy by learning rate."
        print(f"Best of {LEARNING_RATES}: {choose_learning_rates(scores)}")
        table = _make_tuning_text(scores, title)
        return table_run.write_table("table_tuning", table, scores)
    title, gains = f"{table_run.title}.", make_gains_table(scores)
    text = make_accuracies_text(scores, reported, title, notes if deviations else ())
    names = table_run.write_table("table", text, scores)
    if len(gains):
        names += table_run.write_table("gains", make_gains_text(gains, title), gains)
    return names


def _make_tuning_text(scores: pd.DataFrame, title: str) -> TextTable:
    sections = []
    for partition, group in scores.groupby("partition", sort=False):
        values = group.pivot_table(index="method", columns="local_lr", values="best", sort=False)
        rows = [
            {"Method": get_method_title(str(method))}
            | {f"lr {rate:g}": format_number(row[rate], ".2f") for rate in sorted(values.columns)}
            for method, row in values.iterrows()
        ]
        name = PARTITIONS[str(partition)]
        sections.append(TableSection(rows, name, {"Setting": name}))
    note = (
        "Test accuracy in %, pooled over the clients' tests, in the best evaluation of one run with "
        f"seed {TUNING_SEED}, which no other preset has."
    )
    return TextTable(title, ["Method"], sections, (note,))


main = make_table_program(LEADERBOARD, _write_outputs)
