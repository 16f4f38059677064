"""FedAMP's Figure 3: the collaboration weights of FedAMP and HeurFedAMP.

python experiments/fedamp/fig3.py                  the embedded digits, seconds on 2 cores
python experiments/fedamp/fig3.py --preset cpu     MNIST and Fashion-MNIST, MLP: half an hour
python experiments/fedamp/fig3.py --preset paper   the four data sets: a GPU's work

Makes the missing runs of Table 3 of these two methods; `--show` draws the available ones. The
weights are from the last round (the paper does not state its round): `fig3_DATASET.png` shows the
first seed's, with groups of high mutual weights side by side; `fig3.md` and `fig3.csv` compare
weights inside groups with weights between groups. For each group they also compare with the other
group of the highest weight.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedjax_het import analysis
from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.render import TableSection, TextTable, format_number
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.data import get_client_groups, load_dataset
from fedjax_het.metrics.personal import compute_group_contrast, compute_group_weights
from fedjax_het.papers.fedamp.tables import TABLE3
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.runtime.data_assignment import build_partition

METHODS = ("fedamp", "heurfedamp")
FIG3 = replace(
    TABLE3,
    title="FedAMP, Figure 3: collaboration weights in the last round, clients in groups.",
    presets={name: replace(preset, rows=METHODS) for name, preset in TABLE3.presets.items()},
)
VISIBLE_RATIO = 2.0  # ratio of weights from which a group is visible
CAPTION = (
    "From the runs of Table 3. Mean weights: inside, of other clients of a client's group; "
    "between, of clients of other groups; own, of a client's own model. Weights of a client sum to "
    "1. By group: the weight inside a group divided by its largest weight from another group; 1 "
    "means that the two groups are not distinguished. A group is visible if the ratio is at least "
    f"{VISIBLE_RATIO:g}."
)


def load_client_groups(spec: RunSpec) -> np.ndarray:
    """Return the group of each client `[K]`, from the partition of a run."""
    spec = spec.resolved()
    dataset = load_dataset(spec.dataset, normalization=spec.normalization)
    return get_client_groups(build_partition(spec, dataset))


def collect_collaborations(table_run: TableRun) -> list[dict[str, Any]]:
    """Return dataset, model, method, seed, weights `[K, K]` and groups `[K]` of each run."""
    rows, groups = [], {}
    for cell, result in table_run.iterate_results():
        partition = result.summary["partition_digest"]
        if partition not in groups:
            groups[partition] = load_client_groups(result.spec)
        rows.append(
            {
                "dataset": cell.dataset,
                "model": cell.model,
                "method": cell.method,
                "seed": result.spec.seed,
                "weights": result.artifacts["collaboration"],
                "groups": groups[partition],
            }
        )
    return rows


def compute_contrasts(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Compare weights inside groups with weights between groups.

    Args:
      rows: runs, as `collect_collaborations` returns them.

    Returns:
      A row per run: its identifiers, `compute_group_contrast` of its weights, `ratios` of its
      groups (see `GroupWeights`) as text, and `shown`, the number of visible groups.
    """
    records = []
    for row in rows:
        ratios = compute_group_weights(row["weights"], row["groups"]).ratios
        texts = [f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}" for ratio in ratios]
        records.append(
            {
                **{name: row[name] for name in ("dataset", "model", "method", "seed")},
                "clients": len(row["groups"]),
                "groups": len(ratios),
                **compute_group_contrast(row["weights"], row["groups"])._asdict(),
                "ratios": " ".join(texts),
                "shown": int((ratios >= VISIBLE_RATIO).sum()),
            }
        )
    return pd.DataFrame(records)


def make_text_table(table: pd.DataFrame, title: str) -> TextTable:
    """Format the comparison of `compute_contrasts`.

    Args:
      table: the comparison.
      title: title of the table.

    Returns:
      A section per data set and network.
    """
    sections = []
    for (dataset, model), rows in table.groupby(["dataset", "model"], sort=False):
        texts = [
            {
                "Method": format_row(row.method),
                "Seed": str(row.seed),
                "Clients": str(row.clients),
                "Groups": str(row.groups),
                "Inside": format_number(row.inside, ".4f"),
                "Between": format_number(row.between, ".4f"),
                "Inside / between": format_number(row.ratio, ".1f"),
                "Own": format_number(row.own, ".4f"),
                "By group": row.ratios,
                "That show": f"{row.shown} of {row.groups}",
            }
            for row in rows.itertuples(index=False)
        ]
        labels = {"Data": dataset, "Network": model}
        sections.append(TableSection(texts, f"{dataset}, {model}", labels))
    return TextTable(title, ["Method", "Seed"], sections, [CAPTION, FIG3.note])


def _write_outputs(table_run: TableRun) -> list[str]:
    rows = collect_collaborations(table_run)
    if not rows:
        print("There is no run to draw.")
        return []
    table, figures = compute_contrasts(rows), {}
    has_several_models = table["model"].nunique() > 1
    for (dataset, model), group in table.groupby(["dataset", "model"], sort=False):
        first = [rows[index] for index in group.drop_duplicates("method").index]
        figure = analysis.plot_collaboration(
            [row["weights"] for row in first],
            first[0]["groups"],
            titles=[f"{format_row(row['method'])}, {dataset}, seed {row['seed']}" for row in first],
        )
        figures[f"fig3_{dataset}{'_' + model if has_several_models else ''}.png"] = figure
    return table_run.write_table(
        "fig3", make_text_table(table, f"{table_run.title}."), table, figures
    )


main = make_table_program(FIG3, _write_outputs)
