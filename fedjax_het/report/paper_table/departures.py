"""Where the runs of a table have other settings than the paper's."""

from collections.abc import Sequence
from typing import Any

from fedjax_het.report.cell import Cell
from fedjax_het.report.paper_table.declaration import Experiment
from fedjax_het.report.paper_table.layers import merged, variant_settings
from fedjax_het.settings.spec import RunSpec, of_use

# A cell's place, or the seed's: no departure.
_PLACES = {"algorithm", "dataset", "model", "alpha", "classes", "seed", "partition_seed"}


def departures(experiment: Experiment, cells: Sequence[Cell]) -> list[str]:
    """Settings of these runs that are not those of the paper's table, each as a text that names
    the rows where it is not of all."""
    rows_with: dict[str, list[str]] = {}
    for cell in cells:
        for run in cell.runs[:1]:
            used, paper = run.resolved(), _paper_run(experiment, cell)
            for name, (here, there) in _differences(used.to_dict(), paper.to_dict()).items():
                here, there = (f"{v:g}" if isinstance(v, float) else v for v in (here, there))
                text = f"{name} {here}" + ("" if there is None else f" instead of {there}")
                rows = rows_with.setdefault(text, [])
                if cell.method not in rows:
                    rows.append(cell.method)
    all_rows = {cell.method for cell in cells if cell.runs}
    return [
        text if set(rows) == all_rows else f"{text} ({', '.join(rows)})"
        for text, rows in rows_with.items()
    ]


def _paper_run(experiment: Experiment, cell: Cell) -> RunSpec:
    """The run of a cell as the paper has it."""
    method, variant = experiment.read_row(cell.method, cell.dataset)
    settings = merged(
        experiment.settings,
        experiment.dataset_settings.get(cell.dataset, {}),
        variant_settings(method, variant),
    )
    return RunSpec(
        method,
        cell.dataset,
        model=cell.model,
        classes=cell.classes,
        protocol=experiment.paper,
        **of_use(method, settings),
    ).resolved()


def _differences(used: dict, paper: dict) -> dict[str, tuple[Any, Any]]:
    changed: dict[str, tuple[Any, Any]] = {}
    for name, value in used.items():
        if isinstance(value, dict):
            changed.update(_differences(value, paper.get(name, {})))
        elif name not in _PLACES and value != paper.get(name):
            changed[name] = (value, paper.get(name))
    return changed
