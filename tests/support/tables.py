"""Cells and runs of declared tables."""

import pandas as pd

from fedjax_het.papers.table import TableArguments, make_cells


def list_cells(experiment, preset="paper", **filters):
    """Return the cells of a table with filters of its command line."""
    return make_cells(experiment, TableArguments(preset=preset, **filters))


def list_specs(experiment, preset="paper", **filters):
    """Return the resolved settings of each cell's first run."""
    return [cell.runs[0].resolved() for cell in list_cells(experiment, preset, **filters)]


def list_digests(experiment, preset="paper", **filters):
    """Return the digests of all runs."""
    cells = list_cells(experiment, preset, **filters)
    return {run.digest() for cell in cells for run in cell.runs}


def make_results(cells, accuracy, **columns):
    """Return rows of results of runs that did not happen.

    `accuracy(cell, run)` is None where a run diverged. Every other column is a function of both.
    """
    rows = []
    for cell in cells:
        for run in cell.runs:
            actual = accuracy(cell, run)
            row = {"digest": f"made-{run.digest()}", "settings": run.digest()}
            row |= {"final_accuracy": actual, "final_accuracy_std": 0.0, "diverged": actual is None}
            row |= {"wall_seconds": 1800.0, "dataset": run.dataset}
            rows.append(row | {name: value(cell, run) for name, value in columns.items()})
    return pd.DataFrame(rows)
