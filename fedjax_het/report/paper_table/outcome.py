"""A table whose runs are made."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedjax_het.report.cell import Cell
from fedjax_het.report.paper_table.cells import runs_of
from fedjax_het.report.paper_table.declaration import Experiment

if TYPE_CHECKING:
    import pandas as pd


class Outcome(NamedTuple):
    """What is known of a table once its runs are made."""

    experiment: Experiment
    preset: str
    cells: Sequence[Cell]
    results: "pd.DataFrame"
    curves: "pd.DataFrame"
    reported: "pd.DataFrame"
    directory: Path
    not_run: dict[str, str]
    """Why, by `RunSpec.digest()`."""

    @property
    def own_results(self) -> "pd.DataFrame":
        """Of the cells' runs alone: the folder may hold those of other tables."""
        if not len(self.results):
            return self.results
        own = {run.digest() for run in runs_of(self.cells)}
        return self.results[self.results["settings"].isin(own)]
