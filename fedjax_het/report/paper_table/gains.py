"""What rows gain over others: over random real images, and over the baseline that a paper names."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedjax_het.report.cell import TableCell, parse_row
from fedjax_het.report.paper_table.declaration import TableDeclaration
from fedjax_het.report.render import format_number

if TYPE_CHECKING:
    import pandas as pd


def compute_gains_over_real(
    table: "pd.DataFrame", cells: Sequence[TableCell], experiment: TableDeclaration
) -> "pd.Series":
    """Points by which each row of a comparison of these cells is above the one of the same place
    and method whose data are as many random real images (`TableDeclaration.real_data_rows`); NaN of other methods,
    and of that row itself."""
    import pandas as pd

    rows, no_row = _index_rows_by_column(table, cells), {"mean": math.nan}
    gains = []
    for (column_key, method), row in rows.items():
        real_row = experiment.real_data_rows.get(parse_row(method)[0], "")
        baseline = no_row if method == real_row else rows.get((column_key, real_row), no_row)
        gains.append(row["mean"] - baseline["mean"])
    return pd.Series(gains, dtype=float)


def describe_gains_column(experiment: TableDeclaration) -> str:
    """What the column is."""
    rows = ", ".join(dict.fromkeys(experiment.real_data_rows.values()))
    return (
        "Over real: points above the row that has as many random real images in place of the made "
        f"ones ({rows})."
    )


def describe_relative_gains(
    table: "pd.DataFrame", cells: Sequence[TableCell], experiment: TableDeclaration
) -> str:
    """By how much of the baseline's accuracy the paper's method is above it, measured and reported;
    nothing where neither is known."""
    rows = _index_rows_by_column(table, cells)
    texts = []
    for cell in cells:
        baseline_values = rows.get((cell.column_key, experiment.baseline_row))
        if cell.method != experiment.main_method or baseline_values is None:
            continue
        row = rows[cell.column_key, cell.method]
        gains = {
            what: row[column] / baseline_values[column] - 1
            for what, column in (("measured", "mean"), ("reported", "reported_mean"))
        }
        gain_texts = [f"{format_number(100 * g, '+.1f')} % {w}" for w, g in gains.items() if g == g]
        if gain_texts:
            texts.append(f"{cell.column_label}: {', '.join(gain_texts)}")
    heading = f"Relative gain of {experiment.main_method} over {experiment.baseline_row}"
    return f"{heading}: {'; '.join(texts)}." if texts else ""


def _index_rows_by_column(
    table: "pd.DataFrame", cells: Sequence[TableCell]
) -> dict[tuple[tuple, str], dict]:
    """The rows of a comparison of these cells."""
    records = table.to_dict("records")
    return {(c.column_key, c.method): row for c, row in zip(cells, records, strict=True)}
