"""Known effects of system heterogeneity, each as a paired comparison of two rows.

python experiments/heterogeneity/systems.py                the embedded digits, a minute on 2 cores
python experiments/heterogeneity/systems.py --preset cpu   a twentieth of Fashion-MNIST, an hour

1. Unequal work: FedNova equals FedAvg if all clients make equally many steps. The other rows have
   clients of unequal sizes and drawn epochs (Wang et al., NeurIPS 2020).
2. Stragglers: a server that uses the partial work of stragglers, against a server that drops them
   (Li et al., MLSys 2020).
3. Asynchronous aggregation: the simulated time of FedBuff to an accuracy, against synchronous
   FedAvg (Nguyen et al., AISTATS 2022). All rows have equally many client updates.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

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
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.papers.table.columns import run_paired_test
from fedjax_het.runtime.results import Result

MIN_PAIRS = 3
DEVICES = "speed:sigma=1"
TARGETS = {
    "digits": 0.9,
    "fashion_mnist_twentieth": 0.7,
}  # accuracy whose time is compared, by data set


class Comparison(NamedTuple):
    """A row and the row that it is compared with."""

    section: str
    name: str
    row: str
    reference: str | None = None


def list_comparisons(rounds: int) -> list[Comparison]:
    """List the rows of the experiment.

    Args:
      rounds: rounds of synchronous rows, with half of the clients in each round.

    Returns:
      The rows by section; each reference is a row, too.
    """
    equal = {"rounds": rounds, "local_steps": 20}
    unequal = {
        **{"rounds": rounds, "local_epochs": 5},
        "skew": "power_law:exponent=1",
        "system": "partial_work:stragglers=1,min_share=0.2",
        "averaging": "weighted",
    }
    epochs = {"rounds": rounds, "local_epochs": 5}
    rows = []
    for name, settings in (("equal steps", equal), ("unequal sizes and epochs", unequal)):
        reference = add_row_settings("fedavg", **settings)
        other = add_row_settings("fednova", **settings)
        rows += [
            Comparison("Unequal work", f"FedAvg, {name}", reference),
            Comparison("Unequal work", f"FedNova, {name}", other, reference),
        ]
    for share in (0.5, 0.9):
        dropped = add_row_settings("fedavg", **epochs, system=f"dropout:probability={share}")
        name = f"{100 * share:.0f} % stragglers"
        rows.append(Comparison("Stragglers", f"FedAvg drops {name}", dropped))
        for method in ("fedavg", "fedprox", "fednova"):
            partial = add_row_settings(method, **epochs, system=f"partial_work:stragglers={share}")
            title = f"{get_method_title(method)} uses {name}"
            rows.append(Comparison("Stragglers", title, partial, dropped))
    synchronous = add_row_settings("fedavg", **epochs, system=DEVICES)
    first = add_row_settings("fedavg", **epochs, system=[DEVICES, "over_selection:factor=1.3"])
    buffered = add_row_settings("fedbuff", **{**epochs, "rounds": 2 * rounds}, system=DEVICES)
    rows += [
        Comparison("Time", "FedAvg", synchronous),
        Comparison("Time", "FedAvg, over-selection 1.3", first, synchronous),
        Comparison("Time", "FedBuff", buffered, synchronous),
    ]
    return rows


def _list_rows(rounds: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(comparison.row for comparison in list_comparisons(rounds)))


_ROUNDS = {"quick": 10, "cpu": 100}
SYSTEMS = TableDeclaration(
    name="systems",
    paper="dynafed",
    item="systems",
    title="Known effects of system heterogeneity.",
    has_reported_values=False,
    protocol="standard",
    settings={
        **{"num_clients": 20, "participation": 0.5, "learning_rate": 0.05, "momentum": 0.0},
        "batch_size": 16,
    },
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            alphas=(0.3,),
            seeds=(0, 1, 2),
            rows=_list_rows(_ROUNDS["quick"]),
        ),
        "cpu": Preset(
            datasets=("fashion_mnist_twentieth",),
            models=("mlp",),
            alphas=(0.3,),
            seeds=(1, 2, 3, 4, 5),
            rows=_list_rows(_ROUNDS["cpu"]),
        ),
    },
)


def score_run(result: Result) -> dict[str, float]:
    """Return the accuracy of a run, and the simulated time that it needs to reach its target.

    Args:
      result: a finished run.

    Returns:
      `accuracy`, the mean of the last five evaluations in percent; and `seconds`, the simulated
      seconds to the data set's target, NaN if it is not reached or without simulated time.
    """
    cost = result.costs_to(TARGETS[result.summary["dataset"]])
    seconds = None if cost is None else cost.simulated_seconds
    return {
        "accuracy": 100 * result.summary["final_accuracy"],
        "seconds": math.nan if seconds is None else seconds,
    }


def compare_rows(scores: pd.DataFrame, comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Test the rows against their references, paired over seeds.

    Args:
      scores: `TableRun.collect_scores(score_run)`.
      comparisons: the rows.

    Returns:
      A row per comparison: mean and deviation of the accuracy and of the seconds, the number of
      seeds that reach the target, and for rows with a reference the difference of the accuracies
      with half the width of its 95 % confidence interval and its p-value, and the geometric mean of
      the ratios of the references' seconds to the row's, with its interval.
    """
    by_row = {row: group.set_index("seed") for row, group in scores.groupby("row", sort=False)}
    records = []
    for section, name, row, reference in comparisons:
        if row not in by_row:
            continue
        own = by_row[row]
        seeds = int(own["accuracy"].count())
        record: dict[str, Any] = {"section": section, "name": name, "seeds": seeds}
        for column in ("accuracy", "seconds"):
            record |= {column: own[column].mean(), f"{column}_std": own[column].std()}
        record["num_reached"] = int(own["seconds"].notna().sum())
        if reference in by_row:
            other = by_row[reference]
            test = run_paired_test(own["accuracy"], other["accuracy"], MIN_PAIRS)
            record |= {"difference": test.mean, "half_width": test.half_width, "p": test.p_value}
            ratio = run_paired_test(np.log(other["seconds"]), np.log(own["seconds"]), MIN_PAIRS)
            low, high = ratio.mean - ratio.half_width, ratio.mean + ratio.half_width
            record |= {"speedup": math.exp(ratio.mean)} if math.isfinite(ratio.mean) else {}
            if math.isfinite(ratio.half_width):
                record |= {"speedup_low": math.exp(low), "speedup_high": math.exp(high)}
        records.append(record)
    return pd.DataFrame(records)


def make_text(table: pd.DataFrame, title: str, target: float) -> TextTable:
    """Format the comparisons.

    Args:
      table: as `compare_rows` returns it.
      title: title of the table.
      target: accuracy whose time is compared, a fraction.

    Returns:
      A section per effect.
    """
    sections = []
    for section, group in table.groupby("section", sort=False):
        rows = []
        for record in group.to_dict("records"):
            row = {"Row": record["name"]}
            row["Accuracy"] = format_mean_std(record["accuracy"], record["accuracy_std"])
            difference = record.get("difference", math.nan)
            row["Difference"] = (
                format_difference(difference, record["half_width"])
                if math.isfinite(difference)
                else MISSING
            )
            row["p"] = format_p_value(record.get("p", math.nan))
            row["Seeds"] = str(record["seeds"])
            is_timed = section == "Time"
            reached = f" ({record['num_reached']} of {record['seeds']})"
            seconds = format_number(record["seconds"], ".0f") + reached
            row["Time to target (s)"] = seconds if is_timed else MISSING
            row["Times faster"] = _format_speedup(record) if is_timed else MISSING
            rows.append(row)
        sections.append(TableSection(rows, str(section), {"Effect": str(section)}))
    notes = (
        "Accuracy: test accuracy in %, mean of the last five evaluations, mean ± deviation over "
        "seeds. Difference: points above the row without a difference that precedes it, ± half the "
        "width of the 95 % confidence interval; p: paired t-test over seeds, two-sided.",
        f"Time: simulated seconds to an accuracy of {100 * target:.0f} %, with the seeds that reach "
        "it. Times faster: geometric mean of the ratios to FedAvg's time, with its 95 % interval.",
    )
    return TextTable(title, ["Row"], sections, notes)


def _format_speedup(record: dict[str, Any]) -> str:
    if not math.isfinite(record.get("speedup", math.nan)):
        return MISSING
    low, high = record.get("speedup_low", math.nan), record.get("speedup_high", math.nan)
    interval = f" ({low:.1f} to {high:.1f})" if math.isfinite(low) else ""
    return f"{record['speedup']:.1f}{interval}"


def _write_outputs(table_run: TableRun) -> Sequence[str]:
    scores = table_run.collect_scores(score_run)
    if "accuracy" not in scores:
        print("There is no run to show.")
        return []
    table = compare_rows(scores, list_comparisons(_ROUNDS[table_run.preset]))
    target = TARGETS[table_run.cells[0].dataset]
    text = make_text(table, f"{table_run.title}.", target)
    return table_run.write_table("systems", text, table)


main = make_table_program(SYSTEMS, _write_outputs)
