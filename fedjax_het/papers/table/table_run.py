"""A table whose runs are made."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_het.analysis.comparison import TableCell
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.papers.table.cells import list_unique_runs
from fedjax_het.papers.table.declaration import TableDeclaration
from fedjax_het.runtime.result_store import load_curves, load_result, load_results, select_newest
from fedjax_het.runtime.results import Result

if TYPE_CHECKING:
    import pandas as pd


class TableRun(NamedTuple):
    """What is known of a table once its runs are made."""

    experiment: TableDeclaration
    preset: str
    cells: Sequence[TableCell]
    results: "pd.DataFrame"
    curves: "pd.DataFrame"
    reported: "pd.DataFrame"
    directory: Path
    skip_reasons: dict[str, str]
    """Why, by `RunSpec.digest()`."""
    command_line_overrides: tuple[str, ...] = ()
    """Options of the command line that were given instead of the preset's settings."""

    @classmethod
    def from_directory(
        cls,
        experiment: TableDeclaration,
        preset: str,
        cells: Sequence[TableCell],
        directory: Path,
        skip_reasons: dict[str, str] | None = None,
        *,
        results: "pd.DataFrame | None" = None,
        command_line_overrides: tuple[str, ...] = (),
    ) -> "TableRun":
        """With what the folder holds; results: `newest` of them, where they are loaded already."""
        if results is None:
            results = select_newest(load_results(directory))
        curves, reported = load_curves(directory, results=results), experiment.load_reported()
        reasons = skip_reasons or {}
        return cls(
            experiment,
            preset,
            cells,
            results,
            curves,
            reported,
            directory,
            reasons,
            command_line_overrides,
        )

    @property
    def title(self) -> str:
        """Of what is printed, without a full stop; what the preset says of itself may not hold of
        other settings, which are named."""
        description = self.experiment.presets[self.preset].description
        title = f"{self.experiment.title} Preset {self.preset}{description and ': ' + description}"
        return (
            f"{title}, but {' '.join(self.command_line_overrides)}"
            if self.command_line_overrides
            else title
        )

    def load_run_result(self, run: RunSpec) -> Result | None:
        """None where the run is not made or diverged."""
        if not len(self.results):
            return None
        run_rows = self.results[self.results["settings"] == run.digest()]
        result = load_result(self.directory, run_rows["digest"].iloc[0]) if len(run_rows) else None
        return None if result is None or result.summary["diverged"] else result

    def iterate_results(self) -> Iterator[tuple[TableCell, Result]]:
        """The runs that are made and did not diverge, each with its cell, in the cells' order."""
        for cell in self.cells:
            for run in cell.runs:
                if (result := self.load_run_result(run)) is not None:
                    yield cell, result

    def load_client_accuracies(self, run: RunSpec) -> np.ndarray | None:
        """[K] shares, in the round with the best mean; None where the run is not made or was lost,
        or tests no clients."""
        result = self.load_run_result(run)
        accuracies_by_round = None if result is None else result.metrics.get("client_accuracy")
        if result is None or accuracies_by_round is None:
            return None
        return accuracies_by_round[result.summary["bmta_round"] - 1]

    @property
    def cell_results(self) -> "pd.DataFrame":
        """Of the cells' runs alone: the folder may hold those of other tables."""
        if not len(self.results):
            return self.results
        cell_digests = {run.digest() for run in list_unique_runs(self.cells)}
        return self.results[self.results["settings"].isin(cell_digests)]
