"""The cells of a table, each with the runs that fill it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fedjax_het.analysis.comparison import AVERAGE, TableCell, parse_row
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import drop_unused_settings
from fedjax_het.papers.table.declaration import (
    Preset,
    TableArguments,
    TableDeclaration,
    classify_variant_settings,
    merge_settings,
)
from fedjax_het.utils.errors import require, require_name

ALL_ROWS = "all"  # what `--methods` takes besides names


class _ColumnLevel(NamedTuple):
    """A column of the table: at most one of these is given."""

    alpha: float | None = None
    domain: str | None = None
    classes: int | None = None


def make_cells(experiment: TableDeclaration, arguments: TableArguments) -> list[TableCell]:
    """Expand a preset to the cells of the table, with their runs.

    Args:
      experiment: declaration of the table.
      arguments: command line, whose filters replace the preset's values.

    Returns:
      Cells by data set, network, column and row. Runs are checked when they are resolved.

    Raises:
      ConfigError: if the table does not have the preset, a row or what a filter selects.
    """
    from fedjax_het.algorithms import METHODS

    require_name("preset", arguments.preset, experiment.presets)
    preset = experiment.presets[arguments.preset]
    selected_rows = _select_rows(
        experiment.list_rows(arguments.preset), preset.optional_rows, arguments.methods
    )
    _check_filters(preset, arguments)
    reported_datasets = set(experiment.load_reported()["dataset"])
    return [
        TableCell(
            dataset,
            model,
            level.alpha,
            row,
            _make_cell_runs(experiment, arguments, dataset, model, level, row),
            level.domain,
            level.classes,
        )
        for dataset in arguments.datasets or preset.datasets
        for model in arguments.models
        or preset.get_dataset_override(dataset).models
        or preset.models
        for level in _list_levels(preset, arguments, dataset)
        for row in experiment.list_rows(arguments.preset, dataset)
        if row in selected_rows
        and (experiment.row_parser(row, dataset)[0] in METHODS or dataset in reported_datasets)
    ]


def list_unique_runs(cells: Sequence[TableCell]) -> list[RunSpec]:
    """List the runs of the cells, each once."""
    return list({run.digest(): run for cell in cells for run in cell.runs}.values())


def _make_cell_runs(
    experiment: TableDeclaration,
    arguments: TableArguments,
    dataset: str,
    model: str,
    level: _ColumnLevel,
    row: str,
) -> tuple[RunSpec, ...]:
    """One run per seed; none of a method that is not implemented."""
    from fedjax_het.algorithms import METHODS

    method, variant = experiment.row_parser(row, dataset)
    if method not in METHODS:
        return ()
    preset = experiment.presets[arguments.preset]
    override = preset.get_dataset_override(dataset)
    settings = merge_settings(
        experiment.settings,
        experiment.dataset_settings.get(dataset, {}),
        preset.settings,
        override.settings,
        preset.model_settings.get(model, {}),
        preset.method_settings.get(method, {}),
        classify_variant_settings(method, variant),
    )
    settings = drop_unused_settings(method, settings)
    if arguments.rounds is not None:
        settings["rounds"] = arguments.rounds
    if arguments.width is not None and _has_width(model):
        settings["width"] = arguments.width
    if level.classes is not None:
        settings["classes"] = level.classes
    base_spec = RunSpec(
        method, dataset, model=model, alpha=level.alpha, protocol=experiment.paper, **settings
    )
    seeds = arguments.seeds or override.seeds or preset.seeds
    return tuple(replace(base_spec, seed=seed) for seed in seeds)


def _list_levels(preset: Preset, arguments: TableArguments, dataset: str) -> list[_ColumnLevel]:
    """The columns of a data set; a single one without a value where a table has none."""
    if preset.domains:
        return [_ColumnLevel(domain=domain) for domain in (*preset.domains, AVERAGE)]
    if classes := preset.get_dataset_override(dataset).classes or preset.classes:
        return [_ColumnLevel(classes=num_classes) for num_classes in arguments.classes or classes]
    return [_ColumnLevel(alpha=alpha) for alpha in arguments.alphas or preset.alphas or (None,)]


def _check_filters(preset: Preset, arguments: TableArguments) -> None:
    """`ConfigError` for a filter of what this preset's table does not have."""
    declared_models = (override.models for override in preset.dataset_overrides.values())
    models = arguments.models or (
        *preset.models,
        *(name for names in declared_models for name in names),
    )
    if arguments.width is not None:
        expected = "a ConvNet: add --models convnet"
        require(any(map(_has_width, models)), "width", arguments.width, expected)
    if not preset.alphas:
        reason = "columns are domains" if preset.domains else "the partition takes no alpha"
        require(arguments.alphas is None, "alphas", arguments.alphas, f"none: {reason}")
    if not (
        preset.classes or any(override.classes for override in preset.dataset_overrides.values())
    ):
        reason = "the table has no number of labels per client"
        require(arguments.classes is None, "classes", arguments.classes, f"none: {reason}")


def _has_width(model: str) -> bool:
    from fedjax_het.nn import NETWORKS

    return model in NETWORKS and "width" in NETWORKS[model].options


def _select_rows(
    rows: tuple[str, ...], optional_rows: tuple[str, ...], method_names: tuple[str, ...] | None
) -> tuple[str, ...]:
    """The rows that the names choose, in the table's order: a row's own name, or a method's, or
    `ALL`; where nothing is chosen, those that are not `more`."""
    if method_names is None:
        return tuple(row for row in rows if row not in optional_rows)
    methods = {row: parse_row(row)[0] for row in rows}
    selected = set()
    for name in method_names:
        if name == ALL_ROWS:
            return rows
        require_name("methods", name, list(dict.fromkeys([*rows, *methods.values(), ALL_ROWS])))
        selected |= {name} if name in rows else {row for row in rows if methods[row] == name}
    return tuple(row for row in rows if row in selected)
