"""What rows gain over others: over random real images, and over the baseline that a paper names."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedjax_het.report.cell import Cell, parse_row
from fedjax_het.report.paper_table.declaration import Experiment
from fedjax_het.report.render import number_text

if TYPE_CHECKING:
    import pandas as pd


def gains_over_real(
    table: "pd.DataFrame", cells: Sequence[Cell], experiment: Experiment
) -> "pd.Series":
    """Points by which each row of a comparison of these cells is above the one of the same place
    and method whose data are as many random real images (`Experiment.real`); NaN of other methods,
    and of that row itself."""
    import pandas as pd

    rows, missing = _by_place(table, cells), {"mean": math.nan}
    found = []
    for (place, method), row in rows.items():
        real = experiment.real.get(parse_row(method)[0], "")
        over = missing if method == real else rows.get((place, real), missing)
        found.append(row["mean"] - over["mean"])
    return pd.Series(found, dtype=float)


def gains_note(experiment: Experiment) -> str:
    """What the column is."""
    rows = ", ".join(dict.fromkeys(experiment.real.values()))
    return (
        "Over real: points above the row that has as many random real images in place of the made "
        f"ones ({rows})."
    )


def relative_gains_note(
    table: "pd.DataFrame", cells: Sequence[Cell], experiment: Experiment
) -> str:
    """By how much of the baseline's accuracy the paper's method is above it, measured and reported;
    nothing where neither is known."""
    rows = _by_place(table, cells)
    texts = []
    for cell in cells:
        base = rows.get((cell.place, experiment.baseline))
        if cell.method != experiment.focus or base is None:
            continue
        row = rows[cell.place, cell.method]
        gains = {
            what: row[column] / base[column] - 1
            for what, column in (("measured", "mean"), ("reported", "reported_mean"))
        }
        known = [f"{number_text(100 * g, '+.1f')} % {w}" for w, g in gains.items() if g == g]
        if known:
            texts.append(f"{cell.group}: {', '.join(known)}")
    what = f"Relative gain of {experiment.focus} over {experiment.baseline}"
    return f"{what}: {'; '.join(texts)}." if texts else ""


def _by_place(table: "pd.DataFrame", cells: Sequence[Cell]) -> dict[tuple[tuple, str], dict]:
    """The rows of a comparison of these cells."""
    records = table.to_dict("records")
    return {(c.place, c.method): row for c, row in zip(cells, records, strict=True)}
