"""Where the runs of a table have other settings than the paper's."""

from collections.abc import Sequence
from typing import Any

from fedjax_het.analysis.comparison import TableCell
from fedjax_het.config.run_spec import RunSpec, drop_unused_settings
from fedjax_het.papers.table.declaration import (
    TableDeclaration,
    classify_variant_settings,
    merge_settings,
)

# A cell's place, or the seed's: no departure.
_CELL_SETTINGS = {"algorithm", "dataset", "model", "alpha", "classes", "seed", "partition_seed"}


def list_protocol_deviations(experiment: TableDeclaration, cells: Sequence[TableCell]) -> list[str]:
    """Settings of these runs that are not those of the paper's table, each as a text that names
    the rows where it is not of all."""
    rows_by_deviation: dict[str, list[str]] = {}
    for cell in cells:
        for run in cell.runs[:1]:
            used_spec, paper_spec = run.resolved(), _make_paper_spec(experiment, cell)
            for name, (used_value, paper_value) in _find_differences(
                used_spec.to_dict(), paper_spec.to_dict()
            ).items():
                used_value, paper_value = (
                    f"{v:g}" if isinstance(v, float) else v for v in (used_value, paper_value)
                )
                text = f"{name} {used_value}" + (
                    "" if paper_value is None else f" instead of {paper_value}"
                )
                rows = rows_by_deviation.setdefault(text, [])
                if cell.method not in rows:
                    rows.append(cell.method)
    all_rows = {cell.method for cell in cells if cell.runs}
    return [
        text if set(rows) == all_rows else f"{text} ({', '.join(rows)})"
        for text, rows in rows_by_deviation.items()
    ]


def _make_paper_spec(experiment: TableDeclaration, cell: TableCell) -> RunSpec:
    """The run of a cell as the paper has it."""
    method, variant = experiment.row_parser(cell.method, cell.dataset)
    settings = merge_settings(
        experiment.settings,
        experiment.dataset_settings.get(cell.dataset, {}),
        classify_variant_settings(method, variant),
    )
    return RunSpec(
        method,
        cell.dataset,
        model=cell.model,
        classes=cell.classes,
        protocol=experiment.paper,
        **drop_unused_settings(method, settings),
    ).resolved()


def _find_differences(used_settings: dict, paper_settings: dict) -> dict[str, tuple[Any, Any]]:
    differences: dict[str, tuple[Any, Any]] = {}
    for name, value in used_settings.items():
        if isinstance(value, dict):
            differences.update(_find_differences(value, paper_settings.get(name, {})))
        elif name not in _CELL_SETTINGS and value != paper_settings.get(name):
            differences[name] = (value, paper_settings.get(name))
    return differences
