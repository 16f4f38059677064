"""Cells of a table, each with the runs that fill it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import AVERAGE, TableCell, parse_row
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.nn import NETWORKS
from fedjax_het.papers.table.declaration import Preset, TableArguments, TableDeclaration
from fedjax_het.utils.errors import ConfigError, display_name, require, require_name, suggest_name

ALL_ROWS = "all"  # value of `--methods`


def make_cells(experiment: TableDeclaration, arguments: TableArguments) -> list[TableCell]:
    """Expand a preset to the cells of the table, with their runs.

    Args:
      experiment: declaration of the table.
      arguments: command line, whose filters replace the preset's values.

    Returns:
      Cells by data set, network, column and row. Runs are checked when they are resolved.

    Raises:
      ConfigError: if the table does not have the preset, a row or a selected value.

    Example:
      >>> from fedjax_het.papers.dynafed.tables import TABLE1
      >>> from fedjax_het.papers.table import TableArguments, make_cells
      >>> cells = make_cells(TABLE1, TableArguments("quick", methods=("fedavg",)))
      >>> [(cell.method, cell.alpha, len(cell.runs)) for cell in cells][:2]
      [('fedavg', 0.01, 2), ('fedavg', 0.04, 2)]
    """
    require_name("preset", arguments.preset, experiment.presets)
    preset = experiment.presets[arguments.preset]
    all_rows = experiment.list_rows(arguments.preset)
    selected_rows = _select_rows(all_rows, preset.optional_rows, arguments.methods)
    _check_filters(preset, arguments)
    cells = []
    for dataset in arguments.datasets or preset.datasets:
        models = arguments.models or preset.get_dataset_override(dataset).models or preset.models
        levels = _list_levels(preset, arguments, dataset)
        rows = experiment.list_rows(arguments.preset, dataset)
        for model, level, row in product(models, levels, rows):
            if row in selected_rows:
                cell = replace(TableCell(dataset, model, None, row), **level)
                cells.append(replace(cell, runs=_make_runs(experiment, arguments, cell)))
    return cells


def list_unique_runs(cells: Sequence[TableCell]) -> list[RunSpec]:
    """List the runs of the cells, each once."""
    return list({run.digest(): run for cell in cells for run in cell.runs}.values())


def _make_runs(
    experiment: TableDeclaration, arguments: TableArguments, cell: TableCell
) -> tuple[RunSpec, ...]:
    """Return one run per seed."""
    method, _ = experiment.row_parser(cell.method, cell.dataset)
    preset = experiment.presets[arguments.preset]
    override = preset.get_dataset_override(cell.dataset)
    _, settings = experiment.merge_row_settings(
        cell.method,
        cell.dataset,
        preset.settings,
        override.settings,
        preset.model_settings.get(cell.model, {}),
        preset.method_settings.get(method, {}),
    )
    if arguments.rounds is not None:
        settings["rounds"] = arguments.rounds
    if arguments.validation is not None:
        settings["validation"] = arguments.validation
    if arguments.width is not None and _has_width(cell.model):
        settings["width"] = arguments.width
    if cell.classes is not None:
        settings["classes"] = cell.classes
    settings |= {"model": cell.model, "alpha": cell.alpha, "protocol": experiment.run_protocol}
    base_spec = RunSpec(method, cell.dataset, **settings)
    seeds = arguments.seeds or override.seeds or preset.seeds
    return tuple(replace(base_spec, seed=seed) for seed in seeds)


def _list_levels(preset: Preset, arguments: TableArguments, dataset: str) -> list[dict[str, Any]]:
    """Return the columns of a data set; a single one without a value if the table has none."""
    if preset.domains:
        return [{"domain": domain} for domain in (*preset.domains, AVERAGE)]
    if classes := preset.get_dataset_override(dataset).classes or preset.classes:
        return [{"classes": num_classes} for num_classes in arguments.classes or classes]
    return [{"alpha": alpha} for alpha in arguments.alphas or preset.alphas or (None,)]


def _check_filters(preset: Preset, arguments: TableArguments) -> None:
    """Raise ConfigError for a filter of a quantity that the preset's table does not have."""
    overrides = preset.dataset_overrides.values()
    own_models = (*preset.models, *(name for override in overrides for name in override.models))
    if arguments.width is not None:
        has_width = any(map(_has_width, arguments.models or own_models))
        require(has_width, "width", arguments.width, "a ConvNet: add --models convnet")
    if not preset.alphas:
        reason = "the rows set the partition, with its alpha"
        if preset.domains:
            reason = "columns are domains"
        elif not any("partition" in parse_row(row)[1] for row in preset.rows):
            reason = "the partition takes no alpha"
        _require_no_filter("alphas", arguments.alphas, reason)
    if not preset.classes and not any(override.classes for override in overrides):
        reason = "the table has no columns of numbers of labels per client"
        _require_no_filter("classes", arguments.classes, reason)


def _require_no_filter(name: str, values: tuple[float, ...] | None, reason: str) -> None:
    """Raise ConfigError for values of a filter that the table does not have."""
    words = " ".join(f"{value:g}" for value in values or ())
    require(values is None, name, words, f"no value: {reason}")


def _has_width(model: str) -> bool:
    return model in NETWORKS and "width" in NETWORKS[model].options


def _make_row_error(name: str, rows: Iterable[str], methods: Iterable[str]) -> ConfigError:
    """Return the error of a name that no row of the table has, with the methods of the rows."""
    names = list(dict.fromkeys([*methods, ALL_ROWS]))
    suggestion = suggest_name(name, names if "(" not in name else list(rows))
    hint = f"expected {', '.join(names)}"
    kind = "no row of this table"
    if suggestion is not None and name not in METHODS:
        kind, hint = "unknown", f"did you mean {suggestion!r}?"
    return ConfigError(f"{display_name('methods')} = {name!r} is {kind}: {hint}")


def _select_rows(
    rows: tuple[str, ...], optional_rows: tuple[str, ...], names: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Return the rows that names of rows or methods select; by default all but optional rows."""
    if names is None:
        return tuple(row for row in rows if row not in optional_rows)
    variants = {row: parse_row(row) for row in rows}
    methods = {row: method for row, (method, _) in variants.items()}
    selected = set()
    for name in names:
        if name == ALL_ROWS:
            return rows
        if "(" in name:  # a row, maybe with former names of settings
            name = next((row for row in rows if variants[row] == parse_row(name)), name)
        if name not in rows and name not in methods.values():
            raise _make_row_error(name, rows, methods.values())
        selected |= {name} if name in rows else {row for row in rows if methods[row] == name}
    return tuple(row for row in rows if row in selected)
