"""A paper's table as data, and the one program that fills, prints and draws it.

A file in `experiments/` declares an `Experiment` and calls `main`. All that two tables could share
is here, so that they differ only in what they declare.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het import report
from fedjax_het.common.errors import exit_status, require, require_name
from fedjax_het.report import Cell
from fedjax_het.report.render import number_text
from fedjax_het.report.reported import reported_values
from fedjax_het.report.write import write_figure, write_text
from fedjax_het.running import store
from fedjax_het.running.ledger import describe
from fedjax_het.running.sweeps import plan_sweep, sweep
from fedjax_het.settings.spec import RunSpec, of_use

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fedjax_het.data import Dataset

_FIELDS = {f.name for f in fields(RunSpec)}


def parse_row_of_any(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """`report.parse_row`, whatever the data set."""
    return report.parse_row(row)


@dataclass(frozen=True)
class Own:
    """What a preset has for one data set instead of its own; what is empty is the preset's."""

    rows: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


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
    """Labels per client. Neither these nor alphas nor domains: one cell for each data set, network
    and row."""
    rows: tuple[str, ...] = ()
    """Instead of the paper's."""
    settings: dict[str, Any] = field(default_factory=dict)
    of_dataset: dict[str, Own] = field(default_factory=dict)
    model_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    method_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: str = ""
    """Said in the table's title, after the preset's name."""
    make_dataset: "Callable[[], Dataset] | None" = None
    """Makes what the data set `user` is."""


@dataclass(frozen=True)
class Experiment:
    """One table of one paper. Its first preset is the default."""

    name: str
    """Names the folder of its results."""
    paper: str
    """Its values are those of `reported_values`, its protocol that of `RunSpec`."""
    item: str
    title: str
    presets: dict[str, Preset]
    settings: dict[str, Any] = field(default_factory=dict)
    """Where this table of the paper departs from the paper's protocol."""
    dataset_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same of one data set."""
    reported: bool = True
    """Whether the paper gives its values as numbers; if not, a preset has rows."""
    read_row: Callable[[str, str], tuple[str, dict[str, Any]]] = parse_row_of_any
    """A row's method and its variant's settings (fields of `RunSpec`; options and hyper-parameters
    by name), from the row and the data set."""
    note: str = ""
    """Printed under the table: what to know about the paper's values."""
    folder: str = ""
    """Names the folder instead, where several tables share one, so that no run of theirs is made
    twice; files are then named after the table (`table1.md`, `table1_curves.png`)."""

    def values(self) -> "pd.DataFrame":
        """The paper's, as `reported_values` has them; no row where it gives none."""
        if self.reported:
            return reported_values(self.paper, self.item)
        return reported_values(self.paper).head(0)

    def rows(self, preset: str, dataset: str | None = None) -> tuple[str, ...]:
        """The rows in order, the paper's unless the preset has its own: methods, and variants as
        `read_row` reads them. A method without an implementation stays a row.

        dataset None: those of all its data sets."""
        own = self.presets[preset].of_dataset
        if dataset is None:
            datasets = [*self.presets[preset].datasets, *own]
            rows = [row for each in datasets for row in self.rows(preset, each)]
            return tuple(dict.fromkeys(rows))
        theirs = self.values()["method"]
        chosen = own[dataset].rows if dataset in own else ()
        return chosen or self.presets[preset].rows or tuple(dict.fromkeys(theirs))


@dataclass
class Arguments:
    """The command line of every table."""

    preset: str
    """What is run, unless a filter below says otherwise."""
    datasets: tuple[str, ...] | None = None
    """Data sets instead of the preset's."""
    models: tuple[str, ...] | None = None
    """Networks instead of the preset's."""
    alphas: tuple[float, ...] | None = None
    """Dirichlet concentrations instead of the preset's."""
    classes: tuple[int, ...] | None = None
    """Labels per client instead of the preset's."""
    methods: tuple[str, ...] | None = None
    """Only these rows of the table; a method's name stands for all its variants."""
    seeds: tuple[int, ...] | None = None
    """Seeds instead of the preset's."""
    rounds: int | None = None
    """Rounds of every run."""
    width: int | None = None
    """Filters of the ConvNet."""
    output_dir: str | None = None
    """Folder of the results (default: results/TABLE-PRESET). A run found there is not repeated."""
    list: bool = False
    """Print the runs and whether they are done; run nothing."""
    show: bool = False
    """Print and draw what is there; run nothing."""


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
        own = {run.digest() for run in _runs(self.cells)}
        return self.results[self.results["settings"].isin(own)]


def main(
    experiment: Experiment,
    argv: Sequence[str] | None = None,
    *,
    write: "Callable[[Outcome], Sequence[str]] | None" = None,
) -> int:
    """Make the runs that are missing, then print the table, and write it and the learning curves.

    `argv` is the command line after the program's name (default: `sys.argv`). `write`: what is made
    of the outcome instead (default: `write_table`); it returns the names of the files it wrote.
    Returns the exit status: 0; 2 for a setting that cannot be used and when no run could be made;
    130 after Ctrl-C.
    """
    import tyro

    arguments = tyro.cli(
        Arguments,
        args=argv,
        description=f"{experiment.title} Presets: {', '.join(experiment.presets)}.",
        default=Arguments(preset=next(iter(experiment.presets))),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return exit_status(
        lambda: _run(experiment, arguments, write or write_table),
        name="error",
        stopped="stopped; the same command goes on from the runs that are done",
    )


def _run(
    experiment: Experiment, arguments: Arguments, write: Callable[[Outcome], Sequence[str]]
) -> int:
    table_cells = make_cells(experiment, arguments)
    make_dataset = experiment.presets[arguments.preset].make_dataset
    dataset = make_dataset() if make_dataset else None
    specs = _runs(table_cells)
    folder = experiment.folder or experiment.name
    directory = Path(arguments.output_dir or f"results/{folder}-{arguments.preset}")
    if arguments.list:
        for digest, spec, state in plan_sweep(specs, directory, dataset=dataset):
            print(f"{digest}  {state:10}  {describe(spec)}")
        return 0

    if arguments.show:
        require(directory.is_dir(), "output_dir", str(directory), "a folder: --show runs nothing")
    reasons = {} if arguments.show else sweep(specs, directory, dataset=dataset).not_run
    outcome = Outcome(
        experiment,
        arguments.preset,
        table_cells,
        store.newest(store.load_results(directory)),
        store.load_curves(directory),
        experiment.values(),
        directory,
        reasons,
    )
    names = write(outcome)
    print(f"Written to {directory}: {', '.join(names)}, and two files per run.")
    return 2 if specs and len(reasons) == len(specs) else 0


def _runs(cells: Sequence[Cell]) -> list[RunSpec]:
    """The runs behind the cells, each once."""
    return list({run.digest(): run for cell in cells for run in cell.runs}.values())


def write_table(outcome: Outcome) -> list[str]:
    """Print the table, and write it in three forms and the learning curves."""
    experiment, cells, results = outcome.experiment, outcome.cells, outcome.results
    table = report.compare(cells, results, outcome.reported)
    notes = [
        report.caption(table),
        *_rank_note(table),
        *([experiment.note] if experiment.note else []),
        *_notes(outcome, table),
        *_divergence_note(report.diverged_runs(cells, results)),
    ]
    about = experiment.presets[outcome.preset].about
    title = f"{experiment.title} Preset {outcome.preset}{about and ': ' + about}."
    text_table = report.comparison_table(table, title=title, notes=notes)
    report.print_table(text_table)
    stem = experiment.item if experiment.folder else "table"
    texts = {
        f"{stem}.md": report.to_markdown(text_table),
        f"{stem}.tex": report.to_latex(text_table),
        f"{stem}.csv": report.to_csv(table),
    }
    for name, text in texts.items():
        write_text(outcome.directory / name, text)
    curves = f"{stem}_curves" if experiment.folder else "curves"
    return [*texts, *write_curves(curves)(outcome)]


def write_curves(name: str) -> Callable[[Outcome], list[str]]:
    """For `main`: the learning curves alone, as `<name>.png`."""

    def write(outcome: Outcome) -> list[str]:
        figure = report.plot_curves(
            outcome.cells, outcome.results, outcome.curves, outcome.reported
        )
        write_figure(outcome.directory / f"{name}.png", figure)
        return [f"{name}.png"]

    return write


def write_drawing(
    name: str,
    draw: "Callable[[pd.DataFrame, pd.DataFrame], Figure]",
    *,
    by: Sequence[str],
    measure: str = "final_accuracy",
) -> Callable[[Outcome], list[str]]:
    """For `main`, of a figure without reported numbers: print the means of its runs, and write them
    and the figure, as `<name>.png`, `<name>.md` and `<name>.csv`.

    draw: from results and curves, as `load_results` and `load_curves` give them, the figure.
    by: settings that have rows of their own in the table, as far as the runs have them.
    """

    def write(outcome: Outcome) -> list[str]:
        experiment, results = outcome.experiment, outcome.own_results
        if not len(results):
            print("No run is there to be drawn.")
            return []
        about = experiment.presets[outcome.preset].about
        chosen = {"by": [each for each in by if each in results], "measure": measure}
        title = f"{experiment.title} Preset {outcome.preset}{about and ': ' + about}"
        table = report.overview_table(results, title=title, **chosen)
        notes = (*table.notes, *([experiment.note] if experiment.note else []))
        reasons = Counter(outcome.not_run.values()).items()
        lost = [f"Not run ({count} runs): {reason}" for reason, count in reasons]
        table = replace(table, notes=(*notes, *lost))
        report.print_table(table)
        write_text(outcome.directory / f"{name}.md", report.to_markdown(table))
        summary = report.summarise_runs(results, **chosen)
        write_text(outcome.directory / f"{name}.csv", report.to_csv(summary))
        write_figure(outcome.directory / f"{name}.png", draw(results, outcome.curves))
        return [f"{name}.png", f"{name}.md", f"{name}.csv"]

    return write


def make_cells(experiment: Experiment, arguments: Arguments) -> list[Cell]:
    """The table's cells after the filters, each with its runs.

    `ConfigError` for a preset or row that the table does not have; runs are checked when resolved.
    """
    from fedjax_het.algorithms import ALGORITHMS
    from fedjax_het.nn import NETWORKS

    require_name("preset", arguments.preset, experiment.presets)
    preset = experiment.presets[arguments.preset]
    rows = _chosen(experiment.rows(arguments.preset), arguments.methods)
    nothing = Own()
    models = arguments.models or (
        *preset.models,
        *(model for own in preset.of_dataset.values() for model in own.models),
    )
    wide = {name for name in models if name in NETWORKS and "width" in NETWORKS[name].options}
    if arguments.width is not None:
        require(bool(wide), "width", arguments.width, "a ConvNet: add --models convnet")
    if not preset.alphas:
        why = "columns are domains" if preset.domains else "the partition takes no alpha"
        require(arguments.alphas is None, "alphas", arguments.alphas, f"none: {why}")
    with_classes = preset.classes or any(own.classes for own in preset.of_dataset.values())
    if not with_classes:
        why = "the table has no number of labels per client"
        require(arguments.classes is None, "classes", arguments.classes, f"none: {why}")

    def runs(
        dataset: str, model: str, alpha: float | None, classes: int | None, row: str
    ) -> tuple[RunSpec, ...]:
        method, variant = experiment.read_row(row, dataset)
        if method not in ALGORITHMS:
            return ()
        own = preset.of_dataset.get(dataset, nothing)
        settings = _merged(
            experiment.settings,
            experiment.dataset_settings.get(dataset, {}),
            preset.settings,
            own.settings,
            preset.model_settings.get(model, {}),
            preset.method_settings.get(method, {}),
            _as_settings(method, variant),
        )
        settings = of_use(method, settings)
        if arguments.rounds is not None:
            settings["rounds"] = arguments.rounds
        if arguments.width is not None and model in wide:
            settings["width"] = arguments.width
        if classes is not None:
            settings["classes"] = classes
        first = RunSpec(
            method, dataset, model=model, alpha=alpha, protocol=experiment.paper, **settings
        )
        seeds = arguments.seeds or own.seeds or preset.seeds
        return tuple(replace(first, seed=seed) for seed in seeds)

    def models_of(dataset: str) -> tuple[str, ...]:
        own = preset.of_dataset.get(dataset, nothing).models
        return arguments.models or own or preset.models

    def levels(dataset: str) -> list[tuple[float | None, str | None, int | None]]:
        """Alpha, domain and number of classes: one of them at most."""
        if preset.domains:
            return [(None, domain, None) for domain in (*preset.domains, report.AVERAGE)]
        own = preset.of_dataset.get(dataset, nothing).classes or preset.classes
        if own and arguments.classes:
            own = arguments.classes
        if own:
            return [(None, None, number) for number in own]
        return [(alpha, None, None) for alpha in arguments.alphas or preset.alphas or (None,)]

    with_reported = set(experiment.values()["dataset"])
    return [
        Cell(dataset, model, alpha, row, runs(dataset, model, alpha, classes, row), domain, classes)
        for dataset in arguments.datasets or preset.datasets
        for model in models_of(dataset)
        for alpha, domain, classes in levels(dataset)
        for row in experiment.rows(arguments.preset, dataset)
        if row in rows
        and (experiment.read_row(row, dataset)[0] in ALGORITHMS or dataset in with_reported)
    ]


def _chosen(rows: tuple[str, ...], wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """The rows that the names choose, in the table's order: a row's own name, or a method's."""
    methods = {row: report.parse_row(row)[0] for row in rows}
    chosen = set()
    for name in wanted or rows:
        require_name("methods", name, list(dict.fromkeys([*rows, *methods.values()])))
        chosen |= {name} if name in rows else {row for row in rows if methods[row] == name}
    return tuple(row for row in rows if row in chosen)


def _as_settings(method: str, variant: dict[str, Any]) -> dict[str, Any]:
    """A variant's settings as fields of `RunSpec`: its own, or a method's option or number."""
    from fedjax_het.algorithms import ALGORITHMS

    settings: dict[str, Any] = {}
    for name, value in variant.items():
        if name in _FIELDS:
            settings[name] = value
        else:
            kind = "options" if name in ALGORITHMS[method].option_names else "hp"
            settings.setdefault(kind, {})[name] = value
    return settings


def _merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Settings of which a later layer wins; hyper-parameters and options one by one."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def _notes(outcome: Outcome, table: "pd.DataFrame") -> list[str]:
    """What a reader must know to compare the measured values with the reported ones."""
    experiment, cells, results = outcome.experiment, outcome.cells, outcome.results
    notes = []
    if departures := _departures(experiment, cells):
        differ = f"Settings that differ from protocol {experiment.paper}"
        notes.append(f"{differ}: {'; '.join(departures)}.")
    unreported = table.groupby("dataset", sort=False)["reported_mean"].count()
    if names := list(unreported.index[unreported == 0]):
        notes.append(f"The paper's table has no values for {', '.join(names)}.")
    if "dataset_note" in results:
        lossy = results[results["settings"].isin(run.digest() for run in _runs(cells))]
        for dataset, note in lossy.groupby("dataset")["dataset_note"].first().dropna().items():
            if note:
                notes.append(f"{dataset}: {note}")
    if unmade := list(dict.fromkeys(cell.method for cell in cells if not cell.runs)):
        notes.append(f"Not implemented here yet: {', '.join(unmade)}.")
    for reason, count in Counter(outcome.not_run.values()).items():
        notes.append(f"Not run ({count} runs): {reason}")
    return notes


def _departures(experiment: Experiment, cells: Sequence[Cell]) -> list[str]:
    """Settings of these runs that are not those of the paper's table."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for run in cell.runs[:1]:
            method, variant = experiment.read_row(cell.method, cell.dataset)
            settings = _merged(
                experiment.settings,
                experiment.dataset_settings.get(cell.dataset, {}),
                _as_settings(method, variant),
            )
            paper = RunSpec(
                method,
                cell.dataset,
                model=cell.model,
                classes=cell.classes,
                protocol=experiment.paper,
                **of_use(method, settings),
            ).resolved()
            used = run.resolved()
            for name, (here, there) in _differences(used.to_dict(), paper.to_dict()).items():
                here, there = (f"{v:g}" if isinstance(v, float) else v for v in (here, there))
                text = f"{name} {here}" + ("" if there is None else f" instead of {there}")
                rows = found.setdefault(text, [])
                if cell.method not in rows:
                    rows.append(cell.method)
    all_rows = {cell.method for cell in cells if cell.runs}
    return [
        text if set(rows) == all_rows else f"{text} ({', '.join(rows)})"
        for text, rows in found.items()
    ]


def _differences(used: dict, paper: dict) -> dict[str, tuple[Any, Any]]:
    places = {"algorithm", "dataset", "model", "alpha", "classes", "seed", "partition_seed"}
    changed = {}
    for name, value in used.items():
        if isinstance(value, dict):
            changed.update(_differences(value, paper.get(name, {})))
        elif name not in places and value != paper.get(name):
            changed[name] = (value, paper.get(name))
    return changed


def _rank_note(table: "pd.DataFrame") -> list[str]:
    """Whether the measured values rank the methods as the reported ones do, where ranks are
    told."""
    if "rank" not in table:
        return []
    found = [
        f"{section} {number_text(rho)} ({count} methods)"
        for section, rho, count in report.rank_correlations(table)
    ]
    told = "Spearman's rank correlation of measured and reported values"
    return [f"{told}: {'; '.join(found)}."] if found else []


def _divergence_note(runs: Sequence[str]) -> list[str]:
    return [f"† Diverged, and left out of the mean: {'; '.join(runs)}."] if runs else []
