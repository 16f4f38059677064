"""Settings of runs in layers: the paper's, the data set's, the preset's, the row's.

The command line of every table.

What a file in `experiments/` declares: a table of a paper, and the presets that fill it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import parse_row
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.papers.reported import load_reported_values

if TYPE_CHECKING:
    import pandas as pd

    from fedjax_het.data import Dataset


_SPEC_FIELDS = {f.name for f in fields(RunSpec)}


def merge_settings(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge settings; a later layer takes precedence, hyper-parameters and options one by one.

    Args:
      *layers: fields of `RunSpec` by name.
    """
    merged_settings: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            merged_settings[name] = (
                {**merged_settings.get(name, {}), **value} if isinstance(value, dict) else value
            )
    return merged_settings


def classify_variant_settings(method: str, variant: dict[str, Any]) -> dict[str, Any]:
    """Sort the settings of a variant into fields of `RunSpec`, options and hyper-parameters.

    Args:
      method: name of the method.
      variant: settings as `parse_row` returns them.

    Returns:
      Fields of `RunSpec`; `options` and `hp` are dictionaries.
    """
    from fedjax_het.algorithms import METHODS

    settings: dict[str, Any] = {}
    for name, value in variant.items():
        if name in _SPEC_FIELDS:
            settings[name] = value
        else:
            kind = "options" if name in METHODS[method].option_names else "hp"
            settings.setdefault(kind, {})[name] = value
    return settings


@dataclass
class TableArguments:
    """The command line of every table."""

    preset: str
    """Size of the table's runs; other flags replace parts of it."""
    datasets: tuple[str, ...] | None = None
    """Data sets of the runs (default: the preset's)."""
    models: tuple[str, ...] | None = None
    """Networks of the runs (default: the preset's)."""
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
    tuned: bool = False
    """Add each method with the best of five values of its main hyperparameter, chosen by one rule
    on a seed that is not averaged."""
    output_dir: str | None = None
    """Folder of the results, where a finished run is not repeated (default: results/TABLE-PRESET)."""
    list: bool = False
    """Print the runs and whether they are done; run nothing."""
    show: bool = False
    """Print and draw the table from the results in the folder; run nothing."""
    pictures: tuple[str, ...] = ()
    """Additional files of each figure: pdf, svg, or dark for a dark variant NAME-dark.png (default:
    PNG only)."""
    quiet: bool = False
    """Print only errors on stderr, and only a last line, a JSON object, on stdout. Without --quiet,
    stdout has a line per run, and stderr shows the current runs; if it is no terminal, a line every
    30 s at first and every 10 min in the end."""
    json: bool = False
    """Print progress, a line per run, log messages and errors on stderr as one JSON object per
    line, and a last JSON object on stdout."""


def parse_row_any_dataset(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """`parse_row`, whatever the data set."""
    return parse_row(row)


@dataclass(frozen=True)
class DatasetOverride:
    """What a preset has for one data set instead of its own; what is empty is the preset's."""

    rows: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


_NO_OVERRIDE = DatasetOverride()


@dataclass(frozen=True)
class Preset:
    """What is run: the grid of a table, and the settings of its runs where they are not the
    paper's own (fields of `RunSpec`; for all runs, for those of one data set, of one network, of
    one method).
    What belongs to local training is left out for methods whose clients do not train."""

    datasets: tuple[str, ...]
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    alphas: tuple[float, ...] = ()
    domains: tuple[str, ...] = ()
    """For a data set of several domains: a column for each and their mean."""
    classes: tuple[int, ...] = ()
    """Numbers of labels per client of the runs (default: the preset's)."""
    rows: tuple[str, ...] = ()
    """Instead of the paper's."""
    optional_rows: tuple[str, ...] = ()
    """Behind them, where they are asked for: by name, or by `--methods all`."""
    settings: dict[str, Any] = field(default_factory=dict)
    dataset_overrides: dict[str, DatasetOverride] = field(default_factory=dict)
    model_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    method_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    description: str = ""
    """Printed in the table's title, after the preset's name."""
    note: str = ""
    """Printed below the table: why a method does not do here what it does in the paper."""
    note_methods: tuple[str, ...] = ()
    """Methods without which the note is not printed; none: it always is."""
    make_dataset: "Callable[[], Dataset] | None" = None
    """Makes what the data set `user` is."""

    def get_note(self, methods: Iterable[str]) -> str:
        """The note that a table of these methods has."""
        note_methods = self.note_methods
        return self.note if not note_methods or {*note_methods} & {*methods} else ""

    def get_dataset_override(self, dataset: str) -> DatasetOverride:
        """What is declared for this data set alone."""
        return self.dataset_overrides.get(dataset, _NO_OVERRIDE)


@dataclass(frozen=True)
class TableDeclaration:
    """One table of one paper. Its first preset is the default."""

    name: str
    """Names the folder of its results."""
    paper: str
    """Its values are those of `load_reported_values`, its protocol that of `RunSpec`."""
    item: str
    title: str
    presets: dict[str, Preset]
    settings: dict[str, Any] = field(default_factory=dict)
    """Where this table of the paper departs from the paper's protocol."""
    dataset_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same of one data set."""
    has_reported_values: bool = True
    """Whether the paper gives its values as numbers; if not, a preset has rows."""
    row_parser: Callable[[str, str], tuple[str, dict[str, Any]]] = parse_row_any_dataset
    """A row's method and its variant's settings (fields of `RunSpec`; options and hyper-parameters
    by name), from the row and the data set."""
    main_method: str = ""
    """The method that the paper is about: every row's difference from it is tested."""
    tuned_hyperparameters: dict[str, str] = field(default_factory=dict)
    """By method the number that `--tuned` tunes."""
    control_rows: dict[str, str] = field(default_factory=dict)
    """Rows that show what a mechanism is worth, by the row that they are a control of."""
    row_display_names: dict[str, str] = field(default_factory=dict)
    """What pictures call a row whose settings are too long for them."""
    real_data_rows: dict[str, str] = field(default_factory=dict)
    """By method that makes data its row with as many random real images: what others gain over it
    is a column."""
    baseline_row: str = ""
    """The row that the paper's relative gains are over."""
    note: str = ""
    """Printed under the table: what to know about the paper's values."""
    results_folder: str = ""
    """Names the folder instead, where several tables share one, so that no run of theirs is made
    twice; files are then named after the table (`table1.md`, `table1_curves.png`)."""

    @property
    def paper_methods(self) -> tuple[str, ...]:
        """Those that the paper introduces: of the same paper as the method of its name."""
        papers = {name: entry.paper for name, entry in METHODS.items()}
        return tuple(name for name in papers if papers[name] == papers.get(self.paper))

    def load_reported(self) -> "pd.DataFrame":
        """The paper's, as `load_reported_values` has them; no row where it gives none."""
        if self.has_reported_values:
            return load_reported_values(self.paper, self.item)
        return load_reported_values(self.paper).head(0)

    def list_rows(self, preset: str, dataset: str | None = None) -> tuple[str, ...]:
        """The rows in order, the paper's unless the preset has its own, and those that have to be
        asked for: methods, and variants as `read_row` reads them. A method without an
        implementation stays a row.

        dataset None: those of all its data sets."""
        preset_declaration = self.presets[preset]
        if dataset is None:
            datasets = [*preset_declaration.datasets, *preset_declaration.dataset_overrides]
            rows = [
                row for dataset_name in datasets for row in self.list_rows(preset, dataset_name)
            ]
            return tuple(dict.fromkeys(rows))
        reported_rows = tuple(dict.fromkeys(self.load_reported()["method"]))
        dataset_rows = (
            preset_declaration.get_dataset_override(dataset).rows
            or preset_declaration.rows
            or reported_rows
        )
        return tuple(dict.fromkeys((*dataset_rows, *preset_declaration.optional_rows)))
