"""The cells of a table, each with the runs that fill it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fedjax_het.common.errors import require, require_name
from fedjax_het.report.cell import AVERAGE, Cell, parse_row
from fedjax_het.report.paper_table.arguments import Arguments
from fedjax_het.report.paper_table.declaration import Experiment, Preset
from fedjax_het.report.paper_table.layers import merged, variant_settings
from fedjax_het.settings.spec import RunSpec, of_use

ALL = "all"  # what `--methods` takes besides names


class _Level(NamedTuple):
    """A column of the table: at most one of these is given."""

    alpha: float | None = None
    domain: str | None = None
    classes: int | None = None


def make_cells(experiment: Experiment, arguments: Arguments) -> list[Cell]:
    """The table's cells after the filters, each with its runs.

    `ConfigError` for a preset or row that the table does not have; runs are checked when resolved.
    """
    from fedjax_het.algorithms import METHODS

    require_name("preset", arguments.preset, experiment.presets)
    preset = experiment.presets[arguments.preset]
    rows = _chosen(experiment.rows(arguments.preset), preset.more_rows, arguments.methods)
    _check_filters(preset, arguments)
    with_reported = set(experiment.values()["dataset"])
    return [
        Cell(
            dataset,
            model,
            level.alpha,
            row,
            _runs(experiment, arguments, dataset, model, level, row),
            level.domain,
            level.classes,
        )
        for dataset in arguments.datasets or preset.datasets
        for model in arguments.models or preset.own(dataset).models or preset.models
        for level in _levels(preset, arguments, dataset)
        for row in experiment.rows(arguments.preset, dataset)
        if row in rows
        and (experiment.read_row(row, dataset)[0] in METHODS or dataset in with_reported)
    ]


def runs_of(cells: Sequence[Cell]) -> list[RunSpec]:
    """The runs behind the cells, each once."""
    return list({run.digest(): run for cell in cells for run in cell.runs}.values())


def _runs(
    experiment: Experiment,
    arguments: Arguments,
    dataset: str,
    model: str,
    level: _Level,
    row: str,
) -> tuple[RunSpec, ...]:
    """One run per seed; none of a method that is not implemented."""
    from fedjax_het.algorithms import METHODS

    method, variant = experiment.read_row(row, dataset)
    if method not in METHODS:
        return ()
    preset = experiment.presets[arguments.preset]
    own = preset.own(dataset)
    settings = merged(
        experiment.settings,
        experiment.dataset_settings.get(dataset, {}),
        preset.settings,
        own.settings,
        preset.model_settings.get(model, {}),
        preset.method_settings.get(method, {}),
        variant_settings(method, variant),
    )
    settings = of_use(method, settings)
    if arguments.rounds is not None:
        settings["rounds"] = arguments.rounds
    if arguments.width is not None and _has_width(model):
        settings["width"] = arguments.width
    if level.classes is not None:
        settings["classes"] = level.classes
    first = RunSpec(
        method, dataset, model=model, alpha=level.alpha, protocol=experiment.paper, **settings
    )
    seeds = arguments.seeds or own.seeds or preset.seeds
    return tuple(replace(first, seed=seed) for seed in seeds)


def _levels(preset: Preset, arguments: Arguments, dataset: str) -> list[_Level]:
    """The columns of a data set; a single one without a value where a table has none."""
    if preset.domains:
        return [_Level(domain=domain) for domain in (*preset.domains, AVERAGE)]
    if classes := preset.own(dataset).classes or preset.classes:
        return [_Level(classes=number) for number in arguments.classes or classes]
    return [_Level(alpha=alpha) for alpha in arguments.alphas or preset.alphas or (None,)]


def _check_filters(preset: Preset, arguments: Arguments) -> None:
    """`ConfigError` for a filter of what this preset's table does not have."""
    declared = (own.models for own in preset.of_dataset.values())
    models = arguments.models or (*preset.models, *(name for names in declared for name in names))
    if arguments.width is not None:
        expected = "a ConvNet: add --models convnet"
        require(any(map(_has_width, models)), "width", arguments.width, expected)
    if not preset.alphas:
        why = "columns are domains" if preset.domains else "the partition takes no alpha"
        require(arguments.alphas is None, "alphas", arguments.alphas, f"none: {why}")
    if not (preset.classes or any(own.classes for own in preset.of_dataset.values())):
        why = "the table has no number of labels per client"
        require(arguments.classes is None, "classes", arguments.classes, f"none: {why}")


def _has_width(model: str) -> bool:
    from fedjax_het.nn import NETWORKS

    return model in NETWORKS and "width" in NETWORKS[model].options


def _chosen(
    rows: tuple[str, ...], more: tuple[str, ...], wanted: tuple[str, ...] | None
) -> tuple[str, ...]:
    """The rows that the names choose, in the table's order: a row's own name, or a method's, or
    `ALL`; where nothing is chosen, those that are not `more`."""
    if wanted is None:
        return tuple(row for row in rows if row not in more)
    methods = {row: parse_row(row)[0] for row in rows}
    chosen = set()
    for name in wanted:
        if name == ALL:
            return rows
        require_name("methods", name, list(dict.fromkeys([*rows, *methods.values(), ALL])))
        chosen |= {name} if name in rows else {row for row in rows if methods[row] == name}
    return tuple(row for row in rows if row in chosen)
