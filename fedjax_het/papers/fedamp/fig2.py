"""FedAMP's Figure 2: accuracies of the clients of Table 3 by method, with Wilcoxon's tests.

python experiments/fedamp/fig2.py                  the embedded digits, a minute on 2 cores
python experiments/fedamp/fig2.py --preset cpu     MNIST and Fashion-MNIST, MLP: as Table 3
python experiments/fedamp/fig2.py --preset paper   the four data sets: a GPU's work

Makes the missing runs of Table 3; `--show` draws the available ones. A client's accuracy is taken
from the round with the best mean (BMTA). FedAMP and HeurFedAMP are each compared with every other
method, on the same clients: `fig2.png` has the accuracies, `fig2.md` and `fig2.csv` the tests.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from fedjax_het import analysis
from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.render import MISSING, TableSection, TextTable, format_number
from fedjax_het.papers.fedamp.tables import TABLE3
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableRun, make_table_program

FIG2 = replace(TABLE3, title="FedAMP, Figure 2: test accuracies of clients, in groups.")
PAPER_METHODS = ("fedamp", "heurfedamp")
# Data sets for which the paper states that all p-values of these methods against its other methods
# are below 1e-4.
REPORTED_DATASETS = ("fashion_mnist", "emnist_byclass", "cifar100")
REPORTED_BASELINES = {*load_reported_values("fedamp", "table3")["method"]} - {*PAPER_METHODS}
CAPTION = (
    "From the runs of Table 3: Wilcoxon's signed-rank test on the accuracies of the same clients "
    "under two methods, two-sided; ties are dropped. Differences: of the first method minus the "
    "other, over clients, in points. Reported: the paper's p; the paper does not state the sides "
    "of its test. Clients: of all seeds. With n clients without ties p is at least 2^(1 - n): 6e-5 "
    "for 15, 6e-8 for 25."
)


def collect_client_accuracies(table_run: TableRun) -> dict[str, dict[str, np.ndarray]]:
    """Collect the accuracies of clients in the round of the BMTA.

    A method with a missing or diverged seed is left out, because its clients would differ from the
    other methods' clients.

    Args:
      table_run: the table with its runs.

    Returns:
      By data set and network, then by row: fractions of the clients of all seeds.
    """
    accuracies_by_group: dict[str, dict[str, np.ndarray]] = {}
    for cell in table_run.cells:
        rows = accuracies_by_group.setdefault(cell.column_label, {})
        run_accuracies = [table_run.load_client_accuracies(run) for run in cell.runs]
        available = [accuracies for accuracies in run_accuracies if accuracies is not None]
        if available and len(available) == len(cell.runs):
            rows[cell.method] = np.concatenate(available)
    return accuracies_by_group


def run_paired_tests(accuracies: dict[str, dict[str, np.ndarray]]) -> pd.DataFrame:
    """Return a row per data set, network and pair of methods."""
    frames = []
    for group, methods in accuracies.items():
        own = [name for name in PAPER_METHODS if name in methods]
        frames.append(analysis.run_paired_tests(methods, own).assign(place=group))
    return pd.concat(frames, ignore_index=True)


def make_text_table(pairs: pd.DataFrame, title: str, notes: list[str]) -> TextTable:
    """Format the tests of `run_paired_tests`.

    Args:
      pairs: the tests.
      title: title of the table.
      notes: sentences below the table.

    Returns:
      A section per data set and network.
    """
    sections = []
    for group, rows in pairs.groupby("place", sort=False) if len(pairs) else ():
        is_reported = group.split(",")[0] in REPORTED_DATASETS
        texts = [
            {
                "Method": format_row(row.method),
                "Against": format_row(row.against),
                "Clients": str(row.clients),
                "Ties": str(row.ties),
                "Mean difference": format_number(row.mean_difference, "+.2f"),
                "Median difference": format_number(row.median_difference, "+.2f"),
                "p": f"{row.p_value:.2g}",
                "Reported": "< 1e-4"
                if is_reported and row.against in REPORTED_BASELINES
                else MISSING,
            }
            for row in rows.itertuples(index=False)
        ]
        sections.append(TableSection(texts, group, {"Data": group}))
    return TextTable(title, ["Method", "Against"], sections, notes)


def _write_outputs(table_run: TableRun) -> list[str]:
    accuracies = collect_client_accuracies(table_run)
    pairs = run_paired_tests(accuracies)
    missing = dict.fromkeys(
        cell.method for cell in table_run.cells if cell.method not in accuracies[cell.column_label]
    )
    notes = [CAPTION, FIG2.note]
    if missing:
        notes.append(f"Left out, as runs are missing: {', '.join(map(format_row, missing))}.")
    table = make_text_table(pairs, f"{table_run.title}.", notes)
    figures = {"fig2.png": analysis.plot_client_accuracies(accuracies, highlight=PAPER_METHODS)}
    return table_run.write_table("fig2", table, pairs, figures)


main = make_table_program(FIG2, _write_outputs)
