"""FSL's Table I: accuracy and rounds to 50 % with many clients of few labels, on CIFAR-10.

python experiments/fsl/table1.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/table1.py --preset cpu     CIFAR-10, no STL-10: 30 runs of 12 to 40
                                                  minutes, data sharing two of two hours
python experiments/fsl/table1.py --preset paper   CIFAR-10: a GPU's work

As in the paper, a row shows the value of FedDyn's alpha or FSL's gamma with the highest mean
accuracy (on the test images). `fsl(n0=250)` has 25 images from each of ten
clients, `fslsyn(n0=504)` has 56 of each of the nine classes that STL-10 shares.
"""

import math
from dataclasses import replace

from fedjax_het.analysis import TableCell, compare_with_reported
from fedjax_het.analysis.comparison import add_row_settings, format_row
from fedjax_het.papers.fsl.scenarios import CPU_SCENARIO2, PAPER, QUICK_SCENARIO2, SCENARIO2
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import (
    TableDeclaration,
    TableRun,
    make_table_program,
    write_comparison_table,
)

ROWS = tuple(dict.fromkeys(load_reported_values("fsl", "table1")["method"]))
TUNED_PARAMETERS = {"feddyn": ("feddyn_alpha", (0.01, 0.05, 0.1, 0.5))}
GAMMA_VALUES = ("gamma", (0.6, 0.8, 1.0, 1.2))


# Controls of when the server learns: the same examples at the clients, or in pretraining only.
CONTROLS = ("data_sharing", "fedavg(pretrain_epochs=50)")
QUICK_ROWS = ("feddyn", "scaffold", "fslsyn", "fsl(n0=25)", "fsl(n0=50)", *CONTROLS)
CPU_ROWS = ("fedavg", "scaffold", "feddyn", "fsl(n0=250)", "fsl(n0=500)", *CONTROLS)
# Settings that a row is the best of.
VARIANTS: dict[str, tuple[str, ...]] = {}
for _row in (*ROWS, *QUICK_ROWS):
    _name, _values = TUNED_PARAMETERS.get(_row, GAMMA_VALUES)
    VARIANTS[_row] = tuple(add_row_settings(_row, **{_name: value}) for value in _values)
VARIANTS |= {row: (row,) for row in ("fedavg", "scaffold", *CONTROLS)}
# Preset cpu of Figure 5 selects .02 for FSL, SCAFFOLD and FedAvg, which do not learn at .05 or are
# no better. It selects .05 for FedDyn, as in the paper.
FIGURE5_METHOD_SETTINGS = {
    method: {"hp": {"local_lr": 0.02}} for method in ("fsl", "scaffold", "fedavg", "data_sharing")
}


def _expand_variants(*rows: str) -> tuple[str, ...]:
    return tuple(variant for row in rows for variant in VARIANTS[row])


# The paper takes the best learning rates of Figure 5, and states only FedDyn's rate, .05, which is
# the default here.
TABLE1 = TableDeclaration(
    name="fsl-table1",
    results_folder="fsl",
    paper="fsl",
    item="table1",
    title="FSL, Table I: test accuracy with many clients of few labels.",
    presets={
        "quick": replace(QUICK_SCENARIO2, classes=(2,), rows=_expand_variants(*QUICK_ROWS)),
        "cpu": replace(
            CPU_SCENARIO2,
            classes=(2,),
            rows=_expand_variants(*CPU_ROWS),
            method_settings=FIGURE5_METHOD_SETTINGS,
        ),
        "paper": replace(
            PAPER,
            datasets=("cifar10",),
            rows=_expand_variants(*ROWS, *CONTROLS),
            dataset_overrides={},
            classes=(2,),
        ),
    },
    settings={**SCENARIO2.settings, "hp": {"local_lr": 0.05}},
    main_method="fsl",
    dataset_settings=SCENARIO2.dataset_settings,
    row_parser=SCENARIO2.row_parser,
)


def select_best_cells(table_run: TableRun) -> tuple[list[TableCell], str]:
    """Select the best variant of each row.

    A variant with more finished runs is better, then one with a higher mean; of equal variants the
    first is selected.

    Args:
      table_run: the table with its runs.

    Returns:
      The selected cells under the names of the rows, and a note with the variants.
    """
    cells = table_run.cells
    table = compare_with_reported(cells, table_run.results, table_run.reported)
    scores = list(zip(table["seeds"], table["mean"].fillna(-math.inf), strict=True))
    best_by_row: dict[tuple, int] = {}
    for index, cell in enumerate(cells):
        row = next(row for row, variants in VARIANTS.items() if cell.method in variants)
        key = (*cell.column_key, row)
        best = best_by_row.setdefault(key, index)
        if scores[index] > scores[best]:
            best_by_row[key] = index
    names = "; ".join(format_row(cells[index].method) for index in best_by_row.values())
    note = (
        f"Best settings (on the test images, as in the paper): {names}. "
        f"{int(table['diverged'].sum())} of all runs diverged."
    )
    return [replace(cells[index], method=row) for (*_, row), index in best_by_row.items()], note


def _write_outputs(table_run: TableRun) -> list[str]:
    cells, note = select_best_cells(table_run)
    experiment = replace(table_run.experiment, note=note)
    return write_comparison_table(table_run._replace(experiment=experiment, cells=cells))


main = make_table_program(TABLE1, _write_outputs)
