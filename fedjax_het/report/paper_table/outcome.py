"""A table whose runs are made."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_het.report.cell import Cell
from fedjax_het.report.paper_table.cells import runs_of
from fedjax_het.report.paper_table.declaration import Experiment
from fedjax_het.running.store import load_result
from fedjax_het.settings.spec import RunSpec

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

    def client_accuracies(self, run: RunSpec) -> np.ndarray | None:
        """[K] shares, in the round with the best mean; None where the run is not made or was lost,
        or tests no clients."""
        if not len(self.results):
            return None
        own = self.results[self.results["settings"] == run.digest()]
        result = load_result(self.directory, own["digest"].iloc[0]) if len(own) else None
        if result is None or result.summary["diverged"]:
            return None
        measured = result.metrics.get("client_accuracy")
        return None if measured is None else measured[result.summary["bmta_round"] - 1]

    @property
    def own_results(self) -> "pd.DataFrame":
        """Of the cells' runs alone: the folder may hold those of other tables."""
        if not len(self.results):
            return self.results
        own = {run.digest() for run in runs_of(self.cells)}
        return self.results[self.results["settings"].isin(own)]
