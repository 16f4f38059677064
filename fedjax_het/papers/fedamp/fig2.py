"""FedAMP's Figure 2: how the clients of Table 3 fare under each method, with Wilcoxon's tests.

python experiments/fedamp/fig2.py                  the embedded digits, a minute on 2 cores
python experiments/fedamp/fig2.py --preset cpu     MNIST and Fashion-MNIST, MLP: as Table 3
python experiments/fedamp/fig2.py --preset paper   the four data sets: a GPU's work

Makes the runs of Table 3 that are missing; `--show` draws those that are there. A client's
accuracy is that of the round with the best mean (BMTA). FedAMP and HeurFedAMP are each compared
with every other method, on the same clients: `fig2.png` has the accuracies, `fig2.md` and
`fig2.csv` the tests.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from fedjax_het import analysis
from fedjax_het.analysis.render import MISSING, TableSection, TextTable, format_number
from fedjax_het.analysis.report import write_table_files
from fedjax_het.papers.fedamp.table3 import TABLE3
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableRun, make_table_program

FIG2 = replace(TABLE3, title="FedAMP, Figure 2: test accuracies of clients, in groups.")
PAPER_METHODS = ("fedamp", "heurfedamp")
# Where the paper says that every p-value is below 1e-4, of these against its other methods.
REPORTED_DATASETS = ("fashion_mnist", "emnist_byclass", "cifar100")
REPORTED_BASELINES = {*load_reported_values("fedamp", "table3")["method"]} - {*PAPER_METHODS}
CAPTION = (
    "From the runs of Table 3: Wilcoxon's signed-rank test on the accuracies of the same clients "
    "under two methods, two-sided; ties are dropped. Differences: of the first method minus the "
    "other, over clients, in points. Reported: the paper's p, of which it says no more, nor how "
    "many sides its test has. Clients: of all seeds. n clients without ties can give no p below "
    "2^(1 - n): 6e-5 for 15, 6e-8 for 25."
)


def collect_client_accuracies(table_run: TableRun) -> dict[str, dict[str, np.ndarray]]:
    """By data set and network, then by row: [clients of all seeds] in the round of the BMTA.

    A method of which a seed is missing or diverged is left out: its clients would not be those of
    the others.
    """
    accuracies_by_group: dict[str, dict[str, np.ndarray]] = {}
    for cell in table_run.cells:
        rows = accuracies_by_group.setdefault(cell.column_label, {})
        run_accuracies = [table_run.load_client_accuracies(run) for run in cell.runs]
        clients = [accuracies for accuracies in run_accuracies if accuracies is not None]
        if clients and len(clients) == len(cell.runs):
            rows[cell.method] = np.concatenate(clients)
    return accuracies_by_group


def run_paired_tests(accuracies: dict[str, dict[str, np.ndarray]]) -> pd.DataFrame:
    """A row per data set, network and pair of methods."""
    frames = []
    for group, methods in accuracies.items():
        pairs = analysis.run_paired_tests(
            methods, [name for name in PAPER_METHODS if name in methods]
        )
        frames.append(pairs.assign(place=group))
    return pd.concat(frames, ignore_index=True)


def make_text_table(pairs: pd.DataFrame, title: str, notes: list[str]) -> TextTable:
    sections = []
    for group, rows in pairs.groupby("place", sort=False) if len(pairs) else ():
        dataset = group.split(",")[0]
        texts = [
            {
                "Method": row.method,
                "Against": row.against,
                "Clients": str(row.clients),
                "Ties": str(row.ties),
                "Mean difference": format_number(row.mean_difference, "+.2f"),
                "Median difference": format_number(row.median_difference, "+.2f"),
                "p": f"{row.p_value:.2g}",
                "Reported": "< 1e-4"
                if dataset in REPORTED_DATASETS and row.against in REPORTED_BASELINES
                else MISSING,
            }
            for row in rows.itertuples(index=False)
        ]
        sections.append(TableSection(rows=tuple(texts), title=group, labels={"Data": group}))
    values = ("Clients", "Ties", "Mean difference", "Median difference", "p", "Reported")
    return TextTable(title, ("Method", "Against"), values, tuple(sections), tuple(notes))


def write_outputs(table_run: TableRun) -> list[str]:
    accuracies = collect_client_accuracies(table_run)
    pairs = run_paired_tests(accuracies)
    missing = [c.method for c in table_run.cells if c.method not in accuracies[c.column_label]]
    missing_note = (
        f"Left out, as not all their runs are there: {', '.join(dict.fromkeys(missing))}."
    )
    notes = [CAPTION, FIG2.note, *([missing_note] if missing else [])]
    table = make_text_table(pairs, f"{table_run.title}.", notes)
    figures = {"fig2.png": analysis.plot_client_accuracies(accuracies, highlight=PAPER_METHODS)}
    return write_table_files(table_run.directory, "fig2", table, pairs, figures)


main = make_table_program(FIG2, write_outputs)
