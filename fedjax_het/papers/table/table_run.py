"""A table whose runs are made, and the files that it is written to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_het.analysis.comparison import TableCell
from fedjax_het.analysis.figures.style import FigureFormat, write_figure
from fedjax_het.analysis.render import TextTable, print_table, to_csv, to_latex, to_markdown
from fedjax_het.analysis.report import write_files
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.papers.table.cells import list_unique_runs
from fedjax_het.papers.table.declaration import TableDeclaration
from fedjax_het.runtime.result_store import load_curves, load_result, load_results, select_newest
from fedjax_het.runtime.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


QUICK = "quick"
"""Preset that shows that a program works, in seconds to minutes."""
TOY_SCALE = "Toy scale: accuracies and ranks are not the paper's"


class TableRun(NamedTuple):
    """A table with the results of its runs.

    Example:
      >>> import tempfile, pathlib
      >>> from fedjax_het.papers.dynafed.tables import TABLE1
      >>> from fedjax_het.papers.table import TableArguments, TableRun, make_cells
      >>> cells = make_cells(TABLE1, TableArguments("quick"))
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> len(TableRun.from_directory(TABLE1, "quick", cells, folder).results)
      0
    """

    experiment: TableDeclaration
    """Declaration of the table."""
    preset: str
    """Name of the preset."""
    cells: Sequence[TableCell]
    """Cells of the table, with their runs."""
    results: "pd.DataFrame"
    """Results of the runs, as `load_results` returns them."""
    curves: "pd.DataFrame"
    """Curves of the runs, as `load_curves` returns them."""
    reported: "pd.DataFrame"
    """Values that the paper reports."""
    directory: Path
    """Folder of results."""
    skip_reasons: Mapping[str, str] = MappingProxyType({})
    """By `RunSpec.digest()`, the reason why a run was not made."""
    command_line_overrides: tuple[str, ...] = ()
    """Options of the command line that replace the preset's settings."""
    formats: tuple[FigureFormat, ...] = ()
    """Formats of further files of each figure."""
    wide: bool = False
    """Whether all columns and notes are printed, whatever the terminal's width."""

    @classmethod
    def from_directory(
        cls, experiment: TableDeclaration, preset: str, cells: Sequence[TableCell], directory: Path
    ) -> "TableRun":
        """Load the results of a folder.

        Args:
          experiment: declaration of the table.
          preset: name of the preset.
          cells: cells of the table.
          directory: folder of results.

        Returns:
          The table.
        """
        results = select_newest(load_results(directory))
        curves, reported = load_curves(directory, results=results), experiment.load_reported()
        return cls(experiment, preset, cells, results, curves, reported, directory)

    @property
    def title(self) -> str:
        """Title of the table with its preset and the settings that replace the preset's."""
        description = self.experiment.presets[self.preset].description
        title = f"{self.experiment.title} Preset {self.preset}{description and ': ' + description}"
        overrides = " ".join(self.command_line_overrides)
        title = f"{title}, but {overrides}" if overrides else title
        return ". ".join(filter(None, (title, self.scale_warning)))

    @property
    def scale_warning(self) -> str:
        """Statement that the preset `quick` is no reproduction; empty for the other presets."""
        if self.preset != QUICK:
            return ""
        larger = next((name for name in self.experiment.presets if name != QUICK), "")
        hint = f"; --preset {larger} is larger" if larger else ""
        return f"{TOY_SCALE}{hint}"

    @property
    def cell_results(self) -> "pd.DataFrame":
        """Results of the cells' runs; the folder may also hold results of other tables."""
        if not len(self.results):
            return self.results
        digests = {run.digest() for run in list_unique_runs(self.cells)}
        return self.results[self.results["settings"].isin(digests)]

    def load_run_result(self, run: RunSpec) -> Result | None:
        """Load the result of a run; None if the run is not made or diverged."""
        if not len(self.results):
            return None
        digests = self.results["digest"][self.results["settings"] == run.digest()]
        result = load_result(self.directory, digests.iloc[0]) if len(digests) else None
        return None if result is None or result.summary["diverged"] else result

    def iterate_results(self) -> Iterator[tuple[TableCell, Result]]:
        """Yield the results of the runs that did not diverge, each with its cell."""
        for cell in self.cells:
            for run in cell.runs:
                if (result := self.load_run_result(run)) is not None:
                    yield cell, result

    def collect_scores(self, score: Callable[[Result], Mapping[str, float]]) -> "pd.DataFrame":
        """Compute the scores of the finished runs.

        Args:
          score: `score(result)` returns values by name.

        Returns:
          A row per run: `dataset`, `row`, the name of the table's row, `seed` and the scores. The
          scores of a run that diverged are missing.
        """
        import pandas as pd

        records = []
        finished = set(self.results["settings"]) if len(self.results) else set()
        for cell in self.cells:
            for run in cell.runs:
                if run.digest() in finished:
                    result = self.load_run_result(run)
                    scores = {} if result is None else score(result)
                    identity = {"dataset": cell.dataset, "row": cell.method, "seed": run.seed}
                    records.append({**identity, **scores})
        return pd.DataFrame(records)

    def load_client_accuracies(self, run: RunSpec) -> np.ndarray | None:
        """Load the clients' accuracies in the round with the best mean.

        Args:
          run: the run.

        Returns:
          Fractions `[K]`; None if the run is not made, diverged or tests no clients.
        """
        result = self.load_run_result(run)
        accuracies = None if result is None else result.metrics.get("client_accuracy")
        if result is None or accuracies is None:
            return None
        return accuracies[result.summary["bmta_round"] - 1]

    def write_table(
        self,
        stem: str,
        table: TextTable,
        frame: "pd.DataFrame",
        figures: "Mapping[str, Figure] | None" = None,
    ) -> list[str]:
        """Print a table and write it to the folder, see `write_table_files`.

        Args:
          stem: name of the files without suffix.
          table: the table of texts.
          frame: its numbers, for the CSV.
          figures: figures by file name.

        Returns:
          Names of the files.
        """
        return write_table_files(
            self.directory, stem, table, frame, figures, formats=self.formats, wide=self.wide
        )

    def write_figures(self, figures: "Mapping[str, Figure]") -> list[str]:
        """Write figures to the folder.

        Args:
          figures: figures by file name.

        Returns:
          Names of the files.
        """
        for name, figure in figures.items():
            write_figure(self.directory / name, figure, formats=self.formats)
        return list(figures)


def write_table_files(
    directory: Path,
    stem: str,
    table: TextTable,
    frame: "pd.DataFrame",
    figures: "Mapping[str, Figure] | None" = None,
    *,
    formats: Sequence[FigureFormat] = (),
    wide: bool = False,
) -> list[str]:
    """Print a table and write it as `<stem>.md`, `<stem>.tex` and `<stem>.csv`, with figures.

    Args:
      directory: folder of the files.
      stem: name of the files without suffix.
      table: the table of texts.
      frame: its numbers, for the CSV.
      figures: figures by file name.
      formats: formats of further files of each figure.
      wide: whether all columns and notes are printed, whatever the terminal's width.

    Returns:
      Names of the files. If they cannot be written, the log has a line.
    """
    print_table(table, wide=wide, notes_file=f"{stem}.md")
    texts = {"md": to_markdown(table), "tex": to_latex(table), "csv": to_csv(frame)}
    contents = {f"{stem}.{suffix}": text for suffix, text in texts.items()}
    draw_functions = {
        name: lambda figure=figure: figure for name, figure in (figures or {}).items()
    }
    return [path.name for path in write_files(directory, {**contents, **draw_functions}, formats)]
