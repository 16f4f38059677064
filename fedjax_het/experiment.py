"""A paper's table as data, and the one program that fills, prints and draws it.

A file in `experiments/` declares an `Experiment` and calls `main`. All that two tables could share
is here, so that they differ only in what they declare.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedjax_het import report, store
from fedjax_het.errors import exit_status, require, require_name
from fedjax_het.report import Cell
from fedjax_het.report.write import write_figure, write_text
from fedjax_het.reported import reported_values
from fedjax_het.spec import RunSpec
from fedjax_het.sweeps import describe, plan_sweep, sweep


@dataclass(frozen=True)
class Preset:
    """What is run: the grid of a table, and the settings of its runs where they are not the
    paper's own (fields of `RunSpec`; for all runs, for those of one network, of one method)."""

    datasets: tuple[str, ...]
    models: tuple[str, ...]
    alphas: tuple[float, ...]
    seeds: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    model_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    method_settings: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One table of one paper. Its first preset is the default."""

    name: str
    """Names the folder of its results."""
    paper: str
    item: str
    title: str
    presets: dict[str, Preset]
    note: str = ""
    """Printed under the table: what to know about the paper's values."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The rows, in the paper's order. A method without an implementation stays a row."""
        return tuple(dict.fromkeys(reported_values(self.paper, self.item)["method"]))


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
    methods: tuple[str, ...] | None = None
    """Only these rows of the table."""
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


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """Make the runs that are missing, print the table, and write it and the learning curves.

    `argv` is the command line after the program's name (default: `sys.argv`). Returns the exit
    status: 0; 2 for a setting that cannot be used and when no run could be made; 130 after Ctrl-C.
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
        lambda: _run(experiment, arguments),
        name="error",
        stopped="stopped; the same command goes on from the runs that are done",
    )


def _run(experiment: Experiment, arguments: Arguments) -> int:
    table_cells = make_cells(experiment, arguments)
    specs = [spec for cell in table_cells for spec in cell.runs]
    directory = Path(arguments.output_dir or f"results/{experiment.name}-{arguments.preset}")
    if arguments.list:
        for digest, spec, state in plan_sweep(specs, directory):
            print(f"{digest}  {state:10}  {describe(spec)}")
        return 0

    if arguments.show:
        require(directory.is_dir(), "output_dir", str(directory), "a folder: --show runs nothing")
    reasons = {} if arguments.show else sweep(specs, directory).not_run
    results = store.newest(store.load_results(directory))
    reported = reported_values(experiment.paper, experiment.item)
    table = report.compare(table_cells, results, reported)
    title = f"{experiment.title} Preset {arguments.preset}."
    notes = [
        report.CAPTION,
        *([experiment.note] if experiment.note else []),
        *_notes(table_cells, table, results, reasons),
        *_divergence_note(report.diverged_runs(table_cells, results)),
    ]
    text_table = report.comparison_table(table, title=title, notes=notes)
    report.print_table(text_table)
    figure = report.plot_curves(table_cells, results, store.load_curves(directory), reported)
    write_text(directory / "table.md", report.to_markdown(text_table))
    write_text(directory / "table.tex", report.to_latex(text_table))
    write_text(directory / "table.csv", report.to_csv(table))
    write_figure(directory / "curves.png", figure)
    names = "table.md, table.tex, table.csv, curves.png"
    print(f"Written to {directory}: {names}, and two files per run.")
    return 2 if specs and len(reasons) == len(set(map(RunSpec.digest, specs))) else 0


def make_cells(experiment: Experiment, arguments: Arguments) -> list[Cell]:
    """The table's cells after the filters, each with its runs.

    `ConfigError` for a preset or row that the table does not have; runs are checked when resolved.
    """
    from fedjax_het.algorithms import ALGORITHMS

    require_name("preset", arguments.preset, experiment.presets)
    preset = experiment.presets[arguments.preset]
    methods = arguments.methods or experiment.methods
    for method in methods:
        require_name("methods", method, experiment.methods)
    models = arguments.models or preset.models
    if arguments.width is not None:
        require("convnet" in models, "width", arguments.width, "a ConvNet: add --models convnet")

    def runs(dataset: str, model: str, alpha: float, method: str) -> tuple[RunSpec, ...]:
        if method not in ALGORITHMS:
            return ()
        settings = {
            **preset.settings,
            **preset.model_settings.get(model, {}),
            **preset.method_settings.get(method, {}),
        }
        if arguments.rounds is not None:
            settings["rounds"] = arguments.rounds
        if arguments.width is not None and model == "convnet":
            settings["width"] = arguments.width
        first = RunSpec(algorithm=method, dataset=dataset, model=model, alpha=alpha, **settings)
        return tuple(replace(first, seed=seed) for seed in arguments.seeds or preset.seeds)

    with_reported = set(reported_values(experiment.paper, experiment.item)["dataset"])
    return [
        Cell(dataset, model, alpha, method, runs(dataset, model, alpha, method))
        for dataset in arguments.datasets or preset.datasets
        for model in models
        for alpha in arguments.alphas or preset.alphas
        for method in methods
        if method in ALGORITHMS or dataset in with_reported
    ]


def _notes(cells: Sequence[Cell], table: Any, results: Any, reasons: dict[str, str]) -> list[str]:
    """What a reader must know to compare the measured values with the reported ones."""
    notes = []
    if departures := _departures(cells):
        notes.append(f"Settings that differ from the paper's: {'; '.join(departures)}.")
    unreported = table.groupby("dataset", sort=False)["reported_mean"].count()
    if names := list(unreported.index[unreported == 0]):
        notes.append(f"The paper's table has no values for {', '.join(names)}.")
    if "dataset_note" in results:
        lossy = results[results["settings"].isin(run.digest() for c in cells for run in c.runs)]
        for dataset, note in lossy.groupby("dataset")["dataset_note"].first().dropna().items():
            if note:
                notes.append(f"{dataset}: {note}")
    if unmade := list(dict.fromkeys(cell.method for cell in cells if not cell.runs)):
        notes.append(f"Not implemented here yet: {', '.join(unmade)}.")
    for reason, count in Counter(reasons.values()).items():
        notes.append(f"Not run ({count} runs): {reason}")
    return notes


def _departures(cells: Sequence[Cell]) -> list[str]:
    """Settings of these runs that are not the defaults of their method's paper."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for run in cell.runs[:1]:
            used = run.resolved()
            paper = RunSpec(cell.method, cell.dataset, model=cell.model).resolved()
            for name, (here, there) in _differences(used.to_dict(), paper.to_dict()).items():
                text = f"{name} {here}" + ("" if there is None else f" instead of {there}")
                methods = found.setdefault(text, [])
                if cell.method not in methods:
                    methods.append(cell.method)
    run_methods = {cell.method for cell in cells if cell.runs}
    return [
        text if set(methods) == run_methods else f"{text} ({', '.join(methods)})"
        for text, methods in found.items()
    ]


def _differences(used: dict, paper: dict) -> dict[str, tuple[Any, Any]]:
    places = {"algorithm", "dataset", "model", "alpha", "seed", "partition_seed"}
    changed = {}
    for name, value in used.items():
        if isinstance(value, dict):
            changed.update(_differences(value, paper[name]))
        elif name not in places and value != paper.get(name):
            changed[name] = (value, paper.get(name))
    return changed


def _divergence_note(runs: Sequence[str]) -> list[str]:
    return [f"† Diverged, and left out of the mean: {'; '.join(runs)}."] if runs else []
