"""What rows gain over others: over random real images, and over the baseline that a paper names."""

import math
from typing import TYPE_CHECKING

from fedjax_het.report.cell import PLACE, parse_row
from fedjax_het.report.grouping import describe_settings, is_missing
from fedjax_het.report.paper_table.declaration import Experiment
from fedjax_het.report.render import number_text

if TYPE_CHECKING:
    import pandas as pd


def gains_over_real(table: "pd.DataFrame", experiment: Experiment) -> "pd.Series":
    """Points by which each row of a comparison is above the row of the same place and method whose
    data are as many random real images (`Experiment.real`); NaN of other methods, and of itself."""
    import pandas as pd

    real = {
        (_place(row), row["method"]): row["mean"]
        for row in table.to_dict("records")
        if row["method"] in experiment.real.values()
    }
    found = []
    for row in table.to_dict("records"):
        other = experiment.real.get(parse_row(row["method"])[0])
        own = row["mean"] if row["method"] != other else math.nan
        found.append(own - real.get((_place(row), other), math.nan))
    return pd.Series(found, dtype=float)


def gains_note(experiment: Experiment) -> str:
    """What the column is."""
    rows = ", ".join(dict.fromkeys(experiment.real.values()))
    return (
        "Over real: points above the row that has as many random real images in place of the made "
        f"ones ({rows})."
    )


def relative_gains_note(table: "pd.DataFrame", experiment: Experiment) -> str:
    """By how much of the baseline's accuracy the paper's method is above it, measured and reported;
    nothing where neither is known."""
    rows = {(_place(row), row["method"]): row for row in table.to_dict("records")}
    texts = []
    for (place, method), row in rows.items():
        base = rows.get((place, experiment.baseline))
        if method != experiment.focus or base is None:
            continue
        gains = {
            what: row[column] / base[column] - 1
            for what, column in (("measured", "mean"), ("reported", "reported_mean"))
        }
        known = [f"{number_text(100 * g, '+.1f')} % {w}" for w, g in gains.items() if g == g]
        if known:
            texts.append(f"{describe_settings(dict(place))}: {', '.join(known)}")
    what = f"Relative gain of {experiment.focus} over {experiment.baseline}"
    return f"{what}: {'; '.join(texts)}." if texts else ""


def _place(row: dict) -> tuple:
    return tuple((n, row[n]) for n in PLACE if n in row and not is_missing(row[n]))
