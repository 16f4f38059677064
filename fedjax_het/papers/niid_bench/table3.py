"""NIID-Bench's grid: four methods under six skews of MNIST, Fashion-MNIST and CIFAR-10.

```bash
python experiments/niid_bench/table3.py                    digits: a minute
python experiments/niid_bench/table3.py --preset cpu       a tenth of the images: hours
python experiments/niid_bench/table3.py --preset chance    the rows of the leaderboard at 10.0
python experiments/niid_bench/table3.py --preset paper     all images, 50 rounds: needs a GPU
```

The benchmark's rows are the methods FedAvg, FedProx, SCAFFOLD and FedNova. Its README reports four
of the six skews for CIFAR-10. Flower's reproduction of the benchmark reports label skew for all
three data sets. The table shows both beside the measured values. As in the benchmark, the row of
FedProx has the best of several values of mu, chosen by the test accuracy.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from fedjax_het.analysis import parse_row
from fedjax_het.analysis.comparison import add_row_settings, select_cell_runs
from fedjax_het.analysis.overview import get_method_title, get_metric_values, is_diverged
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    format_mean_std,
    format_number,
)
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import (
    Preset,
    TableDeclaration,
    TableRun,
    list_protocol_deviations,
    make_table_program,
)


class Skew(NamedTuple):
    """A column of the benchmark's grid."""

    title: str
    "Name in the table."
    settings: dict[str, Any]
    "Settings of its runs."
    partition: str
    "Name in the reported values."
    level: float | None = None
    "Level in the reported values."


SKEWS = (
    Skew("labels Dir(0.5)", {"partition": "dirichlet_capped"}, "dirichlet_capped", 0.5),
    *(
        Skew(
            f"{count} label{'s' * (count > 1)}",
            {"partition": "classes_per_client", "classes": count},
            "classes_per_client",
            count,
        )
        for count in (1, 2, 3)
    ),
    Skew("noise 0.1", {"partition": "iid", "skew": "noise:std=0.1"}, "noise", 0.1),
    Skew("sizes Dir(0.5)", {"partition": "iid", "skew": "quantity:alpha=0.5"}, "quantity", 0.5),
)
IID = Skew("none", {"partition": "iid"}, "iid")
METHODS = ("fedavg", "fedprox", "scaffold", "fednova")
MUS = (0.001, 0.01, 0.1, 1.0)  # values of FedProx's mu that the benchmark tries
SOURCES = {"table3": "Reported", "flower": "Flower", "parties100": "Reported"}
"""Columns of reported values, by item."""


def name_row(method: str, skew: Skew, **settings: Any) -> str:
    """Return the row of a method under a skew.

    Args:
      method: name of the method.
      skew: one of `SKEWS`.
      **settings: further settings of the row.

    Returns:
      The row, as `parse_row` reads it.
    """
    return add_row_settings(method, **skew.settings, **settings)


def find_skew(settings: dict[str, Any]) -> Skew:
    """Return the skew of a row.

    Args:
      settings: settings of the row by name, as `parse_row` returns them.

    Returns:
      The skew whose settings the row has.
    """
    names = ("partition", "classes", "skew")
    own = {name: settings[name] for name in names if name in settings}
    return next(skew for skew in (*SKEWS, IID) if skew.settings == own)


def _list_rows(mus: Sequence[float] = (), skews: Sequence[Skew] = SKEWS) -> tuple[str, ...]:
    rows = []
    for skew, method in product(skews, METHODS):
        values = [{"prox_mu": mu} for mu in mus] if method == "fedprox" and mus else [{}]
        rows += [name_row(method, skew, **value) for value in values]
    return tuple(rows)


_QUANTITY = SKEWS[-1]
_PARTIES_100 = {"num_clients": 100, "participation": 0.1, "rounds": 40}
_TENTHS = ("mnist_tenth", "fashion_mnist_tenth", "cifar10_tenth")
TABLE3 = TableDeclaration(
    name="niid_bench",
    paper="niid_bench",
    item="table3",
    title="NIID-Bench's grid.",
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            seeds=(0,),
            rows=_list_rows(),
            settings={"rounds": 5, "local_epochs": 5},
        ),
        "cpu": Preset(
            datasets=_TENTHS,
            models=("lenet5",),
            seeds=(0, 1, 2),
            rows=_list_rows(),
            # A tenth of the images has a tenth of the steps, so that smaller batches are used.
            settings={"rounds": 10, "local_epochs": 3, "batch_size": 16},
            description="a tenth of the images, 10 rounds of 3 epochs, batch 16",
        ),
        "chance": Preset(
            datasets=("cifar10_tenth",),
            models=("lenet5",),
            seeds=(0, 1, 2),
            rows=(
                *(name_row(method, _QUANTITY) for method in ("fedavg", "fednova")),
                *(name_row(method, IID, **_PARTIES_100) for method in ("fedavg", "scaffold")),
            ),
            settings={"rounds": 10, "batch_size": 16},
            description="a tenth of the images, rounds of 10 epochs, batch 16",
        ),
        "paper": Preset(
            datasets=("mnist", "fashion_mnist", "cifar10"),
            models=("lenet5",),
            seeds=(0, 1, 2),
            rows=_list_rows(MUS),
        ),
    },
)


def make_scores_table(table_run: TableRun) -> pd.DataFrame:
    """Summarize the final accuracies of each row.

    Args:
      table_run: the table with its runs.

    Returns:
      A row per cell with runs: `dataset`, `skew`, `clients`, `method`, `prox_mu`, the `mean` and
      `std` of the final accuracy in percent over the runs that did not diverge, their number
      `seeds`, and the number of runs that `diverged`.
    """
    records = []
    for cell in table_run.cells:
        runs = select_cell_runs(cell, table_run.results)
        if not len(runs):
            continue
        method, settings = parse_row(cell.method)
        has_diverged = is_diverged(runs)
        values = get_metric_values(runs[~has_diverged], "final_accuracy")
        run = cell.runs[0].resolved()
        records.append(
            {
                "dataset": cell.dataset,
                "skew": find_skew(settings).title,
                "clients": run.num_clients,
                "method": method,
                "prox_mu": run.hp.get("prox_mu"),
                "mean": values.mean(),
                "std": values.std(),
                "seeds": len(values),
                "diverged": int(has_diverged.sum()),
            }
        )
    columns = ("dataset", "skew", "clients", "method", "prox_mu", "mean", "std", "seeds")
    return pd.DataFrame(records, columns=[*columns, "diverged"])


def select_best_mu(scores: pd.DataFrame) -> pd.DataFrame:
    """Keep the value of mu with the best mean accuracy for each row of FedProx.

    Args:
      scores: as `make_scores_table` returns it.

    Returns:
      One row per data set, skew, number of clients and method.
    """
    columns = ["dataset", "skew", "clients", "method"]
    ordered = scores.sort_values("mean", ascending=False, kind="stable", na_position="last")
    return ordered.drop_duplicates(columns).sort_index().reset_index(drop=True)


def make_text(
    scores: pd.DataFrame, reported: pd.DataFrame, title: str, notes: Sequence[str] = ()
) -> TextTable:
    """Format the accuracies beside the reported values.

    Args:
      scores: as `select_best_mu` returns it.
      reported: as `load_reported_values` returns it.
      title: title of the table.
      notes: further notes.

    Returns:
      A section per data set and number of clients with a row per skew and method.
    """
    published: dict[tuple, float] = {}
    for value in reported.itertuples():
        level = None if pd.isna(value.level) else float(value.level)
        key = (value.dataset, value.partition, level, value.clients, value.method)
        published[*key, SOURCES[value.item]] = value.mean
    skews = {skew.title: skew for skew in (*SKEWS, IID)}
    sections = []
    for (dataset, clients), group in scores.groupby(["dataset", "clients"], sort=False):
        rows = []
        for score in group.itertuples():
            skew = skews[score.skew]
            level = None if skew.level is None else float(skew.level)
            key = (dataset.removesuffix("_tenth"), skew.partition, level, clients, score.method)
            row = {"Skew": score.skew, "Method": get_method_title(score.method)}
            measured = format_mean_std(score.mean, score.std, format_spec=".1f")
            row["Accuracy"] = measured if score.seeds else "diverged"
            for column in dict.fromkeys(SOURCES.values()):
                value = published.get((*key, column))
                row[column] = MISSING if value is None else format_number(value, ".1f")
            row["mu"] = MISSING if pd.isna(score.prox_mu) else f"{score.prox_mu:g}"
            row |= {"Seeds": f"{score.seeds}", "Diverged": f"{score.diverged}"}
            rows.append(row)
        name = f"{dataset}, {clients} clients"
        sections.append(TableSection(rows, name, {"Data": name}))
    note = (
        "Test accuracy of the global model in %, averaged over the last five rounds: mean ± "
        "deviation over the seeds that did not diverge. Reported: README of NIID-Bench, commit 61b901a. Flower: README "
        "of Flower's baseline niid_bench. mu: the best of the values of FedProx's row."
    )
    return TextTable(title, ["Skew", "Method"], sections, (note, *notes))


def _write_outputs(table_run: TableRun) -> Sequence[str]:
    scores = make_scores_table(table_run)
    if not len(scores):
        print("There is no run to show.")
        return []
    deviations = list_protocol_deviations(table_run.experiment, table_run.cells)
    notes = [f"Settings that differ from protocol niid_bench: {'; '.join(deviations)}."]
    text = make_text(
        select_best_mu(scores),
        load_reported_values("niid_bench"),
        f"{table_run.title}.",
        notes if deviations else (),
    )
    return table_run.write_table("table3", text, scores)


main = make_table_program(TABLE3, _write_outputs)
