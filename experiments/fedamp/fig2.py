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

from experiments.fedamp.table3 import TABLE3
from fedjax_het import report
from fedjax_het.report.paper_table import Outcome, program
from fedjax_het.report.render import MISSING, Section, TextTable, number_text
from fedjax_het.report.reported import reported_values
from fedjax_het.report.write import publish

FIG2 = replace(TABLE3, title="FedAMP, Figure 2: test accuracies of clients, in groups.")
SUBJECTS = ("fedamp", "heurfedamp")
# Where the paper says that every p-value is below 1e-4, of these against its other methods.
REPORTED_ON = ("fashion_mnist", "emnist_byclass", "cifar100")
THEIRS = {*reported_values("fedamp", "table3")["method"]} - {*SUBJECTS}
CAPTION = (
    "From the runs of Table 3: Wilcoxon's signed-rank test on the accuracies of the same clients "
    "under two methods, two-sided; ties are dropped. Differences: of the first method minus the "
    "other, over clients, in points. Reported: the paper's p, of which it says no more, nor how "
    "many sides its test has. Clients: of all seeds. n clients without ties can give no p below "
    "2^(1 - n): 6e-5 for 15, 6e-8 for 25."
)


def client_accuracies(outcome: Outcome) -> dict[str, dict[str, np.ndarray]]:
    """By data set and network, then by row: [clients of all seeds] in the round of the BMTA.

    A method of which a seed is missing or diverged is left out: its clients would not be those of
    the others.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for cell in outcome.cells:
        rows = found.setdefault(cell.group, {})
        made = [outcome.client_accuracies(run) for run in cell.runs]
        clients = [accuracies for accuracies in made if accuracies is not None]
        if clients and len(clients) == len(cell.runs):
            rows[cell.method] = np.concatenate(clients)
    return found


def tests(accuracies: dict[str, dict[str, np.ndarray]]) -> pd.DataFrame:
    """A row per data set, network and pair of methods."""
    frames = []
    for place, methods in accuracies.items():
        pairs = report.paired_tests(methods, [name for name in SUBJECTS if name in methods])
        frames.append(pairs.assign(place=place))
    return pd.concat(frames, ignore_index=True)


def text_table(pairs: pd.DataFrame, title: str, notes: list[str]) -> TextTable:
    sections = []
    for place, rows in pairs.groupby("place", sort=False) if len(pairs) else ():
        dataset = place.split(",")[0]
        texts = [
            {
                "Method": row.method,
                "Against": row.against,
                "Clients": str(row.clients),
                "Ties": str(row.ties),
                "Mean difference": number_text(row.mean_difference, "+.2f"),
                "Median difference": number_text(row.median_difference, "+.2f"),
                "p": f"{row.p_value:.2g}",
                "Reported": "< 1e-4"
                if dataset in REPORTED_ON and row.against in THEIRS
                else MISSING,
            }
            for row in rows.itertuples(index=False)
        ]
        sections.append(Section(rows=tuple(texts), title=place, labels={"Data": place}))
    values = ("Clients", "Ties", "Mean difference", "Median difference", "p", "Reported")
    return TextTable(title, ("Method", "Against"), values, tuple(sections), tuple(notes))


def write_figure_and_tests(outcome: Outcome) -> list[str]:
    accuracies = client_accuracies(outcome)
    pairs = tests(accuracies)
    missing = [c.method for c in outcome.cells if c.method not in accuracies[c.group]]
    left_out = f"Left out, as not all their runs are there: {', '.join(dict.fromkeys(missing))}."
    notes = [CAPTION, FIG2.note, *([left_out] if missing else [])]
    table = text_table(pairs, f"{outcome.title}.", notes)
    figures = {"fig2.png": report.plot_client_accuracies(accuracies, focus=SUBJECTS)}
    return publish(outcome.directory, "fig2", table, pairs, figures)


main = program(FIG2, write_figure_and_tests)

if __name__ == "__main__":
    raise SystemExit(main())
