"""How good the data are that a method made: DynaFed's matching loss, beside accuracy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.report.cell import Cell
from fedjax_het.report.comparison import runs_made
from fedjax_het.report.grouping import diverged
from fedjax_het.report.render import number_text

if TYPE_CHECKING:
    import pandas as pd

_BY_START = "matching_loss_by_start."


def matching_losses(cells: Sequence[Cell], results: "pd.DataFrame") -> "pd.Series":
    """J of the last fifth of the iterations, mean over a cell's runs; NaN of other methods."""
    import pandas as pd

    return pd.Series([_mean(made, "matching_loss") for made in _made(cells, results)], dtype=float)


def quality_note(cells: Sequence[Cell], results: "pd.DataFrame") -> str:
    """What the column is, and J of the segments that start from the first, the middle and the last
    round."""
    texts = []
    for cell, made in zip(cells, _made(cells, results), strict=True):
        starts = sorted(int(n.removeprefix(_BY_START)) for n in made if n.startswith(_BY_START))
        by_start = {start: _mean(made, f"{_BY_START}{start}") for start in starts}
        if known := {start: j for start, j in by_start.items() if np.isfinite(j)}:
            found = list(known)
            shown = dict.fromkeys((found[0], found[len(found) // 2], found[-1]))
            listed = ", ".join(f"{start}: {number_text(known[start], '.2f')}" for start in shown)
            texts.append(f"{cell.method}, {cell.group}: {listed}")
    return (
        "J: DynaFed's matching loss in the last fifth of the iterations, 1 where training on the "
        "synthetic data does not move the network. By the round that a segment starts from: "
        f"{'; '.join(texts)}."
    )


def _made(cells: Sequence[Cell], results: "pd.DataFrame") -> "list[pd.DataFrame]":
    made = [runs_made(cell, results) for cell in cells]
    return [runs[~diverged(runs)] if len(runs) else runs for runs in made]


def _mean(made: "pd.DataFrame", column: str) -> float:
    return float(made[column].mean()) if column in made and len(made) else float("nan")
