"""Cells and runs of declared tables."""

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
