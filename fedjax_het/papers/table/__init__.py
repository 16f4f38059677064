"""A paper's table as data, and the program that fills, prints and draws it.

A module of a paper declares a `TableDeclaration` and passes it to `make_table_program`. Everything
that tables share is in this package, so that they differ only in their declarations.
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
