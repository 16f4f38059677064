"""A paper's table as data, and the one program that fills, prints and draws it.

A file in `experiments/` declares an `Experiment` and calls `program`. All that two tables could
share is here, so that they differ only in what they declare.
"""

from fedjax_het.report.paper_table.arguments import Arguments
from fedjax_het.report.paper_table.cells import make_cells
from fedjax_het.report.paper_table.command import program
from fedjax_het.report.paper_table.declaration import Experiment, Own, Preset
from fedjax_het.report.paper_table.departures import departures
from fedjax_het.report.paper_table.outcome import Outcome
from fedjax_het.report.paper_table.writing import write_curves, write_drawing, write_table

__all__ = [
    "Arguments",
    "Experiment",
    "Outcome",
    "Own",
    "Preset",
    "departures",
    "make_cells",
    "program",
    "write_curves",
    "write_drawing",
    "write_table",
]
