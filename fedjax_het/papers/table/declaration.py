"""Declaration of a paper's table: its settings in layers, its presets and its command line.

Settings of a run come from the paper's protocol, the data set, the preset and the row; a later
layer takes precedence.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import parse_row
from fedjax_het.analysis.figures.style import FigureFormat
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS, drop_unused_settings
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.tuning.tuner import Budget

if TYPE_CHECKING:
    import pandas as pd

    from fedjax_het.data import Dataset


_SPEC_FIELDS = {f.name for f in fields(RunSpec)}


@dataclass
class TableArguments:
    """The command line of every table.

    Example:
      >>> from fedjax_het.papers.table import TableArguments
      >>> TableArguments("quick", methods=("fedavg",)).rounds is None
      True
    """

    preset: str
    """Size of the table's runs; other flags replace parts of it."""
    datasets: tuple[str, ...] | None = None
    """Data sets of the runs, see `fedjax-het list datasets` (default: the preset's)."""
    models: tuple[str, ...] | None = None
    """Networks of the runs, see `fedjax-het list networks` (default: the preset's)."""
    alphas: tuple[float, ...] | None = None
    """Dirichlet concentrations of the runs (default: the preset's)."""
    classes: tuple[int, ...] | None = None
    """Numbers of labels per client of the runs (default: the preset's)."""
    methods: tuple[str, ...] | None = None
    """Rows of the table: a method's name selects all its variants, `all` selects also the rows that
    the preset omits (default: the preset's)."""
    seeds: tuple[int, ...] | None = None
    """Seeds of the runs (default: the preset's)."""
    rounds: int | None = None
    """Communication rounds of every run (default: the preset's)."""
    width: int | None = None
    """Filters of each convolution of the ConvNet (default: the preset's)."""
    validation: float | None = None
    """Fraction in (0, 1) of each client's training examples that every run withholds for
    validation, by which the best round is chosen (default: the test split is used)."""
    tuned: bool = False
    """Add each row with hyperparameters that `tune` chooses, with equal budgets for all rows, on a
    seed that is not averaged."""
    output_dir: Path | None = None
    """Folder of the results, where no finished run is repeated (default: results/TABLE-PRESET)."""
    list: bool = False
    """Print the runs and whether they are done; run nothing."""
    show: bool = False
    """Print and draw the table from the results in the folder; run nothing."""
    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""
    wide: bool = False
    """Print all columns and notes of the table on a narrow terminal, too."""
    quiet: bool = False
    """Print only errors on stderr, and only a last line, a JSON object, on stdout. Without --quiet,
    stdout has a line per run, and stderr shows the current runs. If stderr is no terminal, it has a
    line every 30 s at first and every 10 min in the end."""
    json: bool = False
    """Print progress, a line per run, log messages and errors on stderr as one JSON object per
    line, and a last JSON object on stdout."""


@dataclass(frozen=True)
class DatasetOverride:
    """Values of a preset for one data set; empty values are the preset's.

    Example:
      >>> from fedjax_het.papers.table import DatasetOverride
      >>> DatasetOverride(classes=(2, 5)).rows
      ()
    """

    rows: tuple[str, ...] = ()
    """Rows of the table."""
    models: tuple[str, ...] = ()
    """Names of networks."""
    classes: tuple[int, ...] = ()
    """Numbers of labels per client."""
    seeds: tuple[int, ...] = ()
    """Seeds of the runs of each cell."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the runs on the data set."""


_NO_OVERRIDE = DatasetOverride()


@dataclass(frozen=True)
class Preset:
    """The grid of a table, and settings of its runs that differ from the paper's.

    Settings are fields of `RunSpec` for all runs, or for runs of one data set, network or method.
    Settings of local training are dropped for methods whose clients do not train.

    Example:
      >>> from fedjax_het.papers.table import Preset
      >>> preset = Preset(datasets=("digits",), models=("mlp",), seeds=(0,), alphas=(0.1,))
      >>> preset.get_dataset_override("digits").rows
      ()
    """

    datasets: tuple[str, ...]
    """Names of data sets."""
    models: tuple[str, ...]
    """Names of networks."""
    seeds: tuple[int, ...]
    """Seeds of the runs of each cell."""
    alphas: tuple[float, ...] = ()
    """Values of alpha of Dirichlet partitions."""
    domains: tuple[str, ...] = ()
    """Domains of the data set: one column for each, and one for their mean."""
    classes: tuple[int, ...] = ()
    """Numbers of labels per client."""
    rows: tuple[str, ...] = ()
    """Rows in place of the paper's."""
    optional_rows: tuple[str, ...] = ()
    """Further rows that must be requested by name or by `--methods all`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of all runs."""
    dataset_overrides: dict[str, DatasetOverride] = field(default_factory=dict)
    """Values by data set."""
    model_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings by network."""
    method_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings by method."""
    description: str = ""
    """Part of the table's title, after the preset's name."""
    note: str = ""
    """Note below the table: why a method's values differ from the paper's values."""
    note_methods: tuple[str, ...] = ()
    """Methods that the note is about; without them it is omitted. Empty: it is always shown."""
    make_dataset: "Callable[[], Dataset] | None" = None
    """Makes the data set `user`."""

    def get_note(self, methods: Iterable[str]) -> str:
        """Return the note of a table with these methods."""
        methods_of_note = self.note_methods
        return self.note if not methods_of_note or {*methods_of_note} & {*methods} else ""

    def get_dataset_override(self, dataset: str) -> DatasetOverride:
        """Return the values that are declared for a data set."""
        return self.dataset_overrides.get(dataset, _NO_OVERRIDE)


@dataclass(frozen=True)
class TableDeclaration:
    """One table of one paper. Its first preset is the default.

    Example:
      >>> from fedjax_het.papers.table import Preset, TableDeclaration
      >>> quick = Preset(datasets=("digits",), models=("mlp",), seeds=(0,), rows=("fedavg", "fsl"))
      >>> table = TableDeclaration(name="mine", paper="dynafed", item="mine", title="Mine.",
      ...     has_reported_values=False, presets={"quick": quick})
      >>> table.list_rows("quick")
      ('fedavg', 'fsl')
    """

    name: str
    """Name of the folder of results."""
    paper: str
    """Name of the reported values (`load_reported_values`)."""
    item: str
    """Name of the table in the reported values, e.g. "table1"."""
    title: str
    """Title of the table."""
    presets: dict[str, Preset]
    """Presets by name."""
    protocol: str = ""
    """Protocol of the runs, see `RunSpec` (default: `paper`)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of this table that differ from the protocol."""
    dataset_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings by data set that differ from the paper's protocol."""
    has_reported_values: bool = True
    """Whether the paper has numbers for the table; if not, every preset must have rows."""
    row_parser: Callable[[str, str], tuple[str, dict[str, Any]]] = lambda row, _: parse_row(row)
    """Function of a row and a data set that returns the method, and settings by name: fields of
    `RunSpec`, options and hyperparameters."""
    main_method: str = ""
    """The paper's method; the differences of all rows from it are tested."""
    budget: Budget | None = None
    """Trials of a search that tunes all rows before they run, see `choose_hyperparameters`. None:
    rows have the protocol's hyperparameters."""
    search_space: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Ranges of the search by hyperparameter, in place of the ranges that `tune` chooses."""
    control_rows: dict[str, str] = field(default_factory=dict)
    """By control row, the row whose mechanism it lacks."""
    row_display_names: dict[str, str] = field(default_factory=dict)
    """Names in figures of rows whose settings are long."""
    real_data_rows: dict[str, str] = field(default_factory=dict)
    """By method that synthesizes data, its row with equally many random real images. The table has
    a column with the gains over this row."""
    baseline_row: str = ""
    """Row that the paper's relative gains refer to."""
    note: str = ""
    """Note below the table about the paper's values."""
    results_folder: str = ""
    """Folder of results in place of `name`. Tables with one folder share their runs, and their
    files have the table's name (`table1.md`, `table1_curves.png`)."""

    @property
    def run_protocol(self) -> str:
        """Protocol of the runs."""
        return self.protocol or self.paper

    @property
    def paper_methods(self) -> tuple[str, ...]:
        """Methods that the paper introduces."""
        papers = {name: entry.paper for name, entry in METHODS.items()}
        return tuple(name for name in papers if papers[name] == papers.get(self.paper))

    def load_reported(self) -> "pd.DataFrame":
        """Load the paper's values as `load_reported_values` does.

        Returns:
          The values. A table without them has one row of the paper's metric, which is of no cell.
        """
        if self.has_reported_values:
            return load_reported_values(self.paper, self.item)
        return load_reported_values(self.paper).head(1).assign(dataset="", method="", mean=math.nan)

    def list_rows(self, preset: str, dataset: str | None = None) -> tuple[str, ...]:
        """List the rows in order, optional rows at the end.

        Args:
          preset: name of the preset.
          dataset: name of a data set; default: all data sets of the preset.

        Returns:
          Methods, and variants as `row_parser` reads them.
        """
        declaration = self.presets[preset]
        if dataset is None:
            datasets = [*declaration.datasets, *declaration.dataset_overrides]
            return tuple(
                dict.fromkeys(r for name in datasets for r in self.list_rows(preset, name))
            )
        rows = declaration.get_dataset_override(dataset).rows or declaration.rows
        rows = rows or self.load_reported()["method"]
        return tuple(dict.fromkeys((*rows, *declaration.optional_rows)))

    def merge_row_settings(
        self, row: str, dataset: str, *preset_layers: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Merge the settings of a row's runs.

        Args:
          row: the row.
          dataset: name of the data set.
          *preset_layers: settings of the preset, a later layer taking precedence; they take
            precedence over the table's, and the row's own settings over them.

        Returns:
          The method, and the fields of `RunSpec` by name that the method uses.
        """
        method, variant = self.row_parser(row, dataset)
        own_settings: dict[str, Any] = {}
        for name, value in variant.items():
            name = HYPERPARAMETER_SETTINGS.get(name, name)
            if name in _SPEC_FIELDS:
                own_settings[name] = value
            else:
                kind = "options" if name in METHODS[method].option_names else "hp"
                own_settings.setdefault(kind, {})[name] = value
        table_settings = self.dataset_settings.get(dataset, {})
        settings = merge_settings(self.settings, table_settings, *preset_layers, own_settings)
        return method, drop_unused_settings(method, settings)


def merge_settings(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge settings; a later layer takes precedence, hyperparameters and options one by one.

    Args:
      *layers: fields of `RunSpec` by name.

    Returns:
      The settings.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            is_nested = isinstance(value, dict)
            merged[name] = {**merged.get(name, {}), **value} if is_nested else value
    return merged
