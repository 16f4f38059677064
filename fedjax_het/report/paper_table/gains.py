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

    means = {
        (cell.place, cell.method): mean for cell, mean in zip(cells, table["mean"], strict=True)
    }
    found = []
    for (place, row), mean in means.items():
        real = experiment.real.get(parse_row(row)[0], "")
        found.append(mean - means.get((place, real), math.nan) if row != real else math.nan)
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
    places = [(cell.place, cell.method) for cell in cells]
    rows = dict(zip(places, table.to_dict("records"), strict=True))
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
