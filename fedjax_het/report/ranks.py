"""How methods rank, and whether measured and reported values rank them alike."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedjax_het.common.doors import validate_arguments
from fedjax_het.common.errors import require_columns
from fedjax_het.report.grouping import describe_settings

if TYPE_CHECKING:
    import pandas as pd

_NUM_DECIMALS = 2  # of the values as printed
_MIN_METHODS = 3  # methods; of two a correlation is 1 or -1


class RankCorrelation(NamedTuple):
    """rho: Spearman's, of measured and reported values of `num_methods` methods."""

    section: str
    rho: float
    num_methods: int


def compute_ranks(values: Sequence[float]) -> list[float]:
    """1 for the highest percentage as printed; equal ones share the better rank, NaN has none."""
    import pandas as pd

    rounded = pd.Series([round(value, _NUM_DECIMALS) for value in values], dtype=float)
    return rounded.rank(method="min", ascending=False).tolist()


@validate_arguments
def add_ranks(table: "pd.DataFrame") -> "pd.DataFrame":
    """The comparison with columns `rank` and `reported_rank`, within a data set, network and alpha.

    Both are among the same rows, so that they compare: those that have a measured and a reported
    value. In a section where nothing is reported, `rank` is among all measured rows. A row that
    lost runs to divergence has none.
    """
    table = table.assign(rank=math.nan, reported_rank=math.nan)
    for _, section_rows in _group_by_section(table):
        ranked_rows = section_rows[_is_comparable(section_rows)]
        if section_rows["reported_mean"].isna().all():
            ranked_rows = section_rows[section_rows["diverged"] == 0]
        else:
            table.loc[ranked_rows.index, "reported_rank"] = compute_ranks(
                ranked_rows["reported_mean"]
            )
        table.loc[ranked_rows.index, "rank"] = compute_ranks(ranked_rows["mean"])
    return table


@validate_arguments
def compute_rank_correlations(table: "pd.DataFrame") -> list[RankCorrelation]:
    """Spearman's rank correlation in each section of a comparison that has at least three methods
    with both values, and where neither are all the same."""
    from scipy import stats

    correlations = []
    for section_settings, section_rows in _group_by_section(table):
        comparable_rows = section_rows[_is_comparable(section_rows)]
        measured, reported = (
            comparable_rows[name].round(_NUM_DECIMALS) for name in ("mean", "reported_mean")
        )
        if (
            len(comparable_rows) >= _MIN_METHODS
            and measured.nunique() > 1
            and reported.nunique() > 1
        ):
            rho = float(stats.spearmanr(measured, reported).statistic)
            correlations.append(
                RankCorrelation(describe_settings(section_settings), rho, len(comparable_rows))
            )
    return correlations


def _group_by_section(table: "pd.DataFrame") -> list[tuple[dict, "pd.DataFrame"]]:
    names = ["dataset", "model", "alpha"]
    require_columns("table", table, (*names, "mean", "reported_mean", "diverged"))
    groups = table.groupby(names, sort=False, dropna=False)
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in groups]


def _is_comparable(section: "pd.DataFrame") -> "pd.Series":
    has_both_values = section["mean"].notna() & section["reported_mean"].notna()
    return has_both_values & (section["diverged"] == 0)
