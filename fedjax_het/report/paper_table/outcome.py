"""A table whose runs are made."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_het.report.cell import Cell
from fedjax_het.report.paper_table.cells import runs_of
from fedjax_het.report.paper_table.declaration import Experiment
from fedjax_het.running.result import Result
from fedjax_het.running.store import load_curves, load_result, load_results, newest
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
    instead: tuple[str, ...] = ()
    """Options of the command line that were given instead of the preset's settings."""

    @classmethod
    def of_folder(
        cls,
        experiment: Experiment,
        preset: str,
        cells: Sequence[Cell],
        directory: Path,
        not_run: dict[str, str] | None = None,
        *,
        results: "pd.DataFrame | None" = None,
        instead: tuple[str, ...] = (),
    ) -> "Outcome":
        """With what the folder holds; results: `newest` of them, where they are loaded already."""
        if results is None:
            results = newest(load_results(directory))
        curves, reported = load_curves(directory, of=results), experiment.values()
        why = not_run or {}
        return cls(experiment, preset, cells, results, curves, reported, directory, why, instead)

    @property
    def title(self) -> str:
        """Of what is printed, without a full stop; what the preset says of itself may not hold of
        other settings, which are named."""
        about = self.experiment.presets[self.preset].about
        title = f"{self.experiment.title} Preset {self.preset}{about and ': ' + about}"
        return f"{title}, but {' '.join(self.instead)}" if self.instead else title

    def result_of(self, run: RunSpec) -> Result | None:
        """None where the run is not made or diverged."""
        if not len(self.results):
            return None
        own = self.results[self.results["settings"] == run.digest()]
        result = load_result(self.directory, own["digest"].iloc[0]) if len(own) else None
        return None if result is None or result.summary["diverged"] else result

    def made(self) -> Iterator[tuple[Cell, Result]]:
        """The runs that are made and did not diverge, each with its cell, in the cells' order."""
        for cell in self.cells:
            for run in cell.runs:
                if (result := self.result_of(run)) is not None:
                    yield cell, result

    def client_accuracies(self, run: RunSpec) -> np.ndarray | None:
        """[K] shares, in the round with the best mean; None where the run is not made or was lost,
        or tests no clients."""
        result = self.result_of(run)
        measured = None if result is None else result.metrics.get("client_accuracy")
        if result is None or measured is None:
            return None
        return measured[result.summary["bmta_round"] - 1]

    @property
    def own_results(self) -> "pd.DataFrame":
        """Of the cells' runs alone: the folder may hold those of other tables."""
        if not len(self.results):
            return self.results
        own = {run.digest() for run in runs_of(self.cells)}
        return self.results[self.results["settings"].isin(own)]
