"""A paper's table as data, and the one program that fills, prints and draws it.

A file in `experiments/` declares an `TableDeclaration` and calls `program`. All that two tables could
share is here, so that they differ only in what they declare.
"""

from fedjax_het.papers.table.cells import make_cells
from fedjax_het.papers.table.command import make_table_program
from fedjax_het.papers.table.declaration import (
    DatasetOverride,
    Preset,
    TableArguments,
    TableDeclaration,
)
from fedjax_het.papers.table.table_run import TableRun
from fedjax_het.papers.table.writer import (
    list_protocol_deviations,
    make_curves_writer,
    make_figure_writer,
    write_comparison_table,
)

__all__ = [
    "DatasetOverride",
    "Preset",
    "TableArguments",
    "TableDeclaration",
    "TableRun",
    "list_protocol_deviations",
    "make_cells",
    "make_curves_writer",
    "make_figure_writer",
    "make_table_program",
    "write_comparison_table",
]
