"""How methods rank, and whether measured and reported values rank them alike."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedjax_het.common.doors import door
from fedjax_het.common.errors import require_columns
from fedjax_het.report.grouping import describe_settings

if TYPE_CHECKING:
    import pandas as pd

_DIGITS = 2  # of the values as printed
_FEWEST = 3  # methods; of two a correlation is 1 or -1


class RankCorrelation(NamedTuple):
    """rho: Spearman's, of measured and reported values of `num_methods` methods."""

    section: str
    rho: float
    num_methods: int


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the highest percentage as printed; equal ones share the better rank, NaN has none."""
    import pandas as pd

    printed = pd.Series([round(value, _DIGITS) for value in values], dtype=float)
    return printed.rank(method="min", ascending=False).tolist()


@door
def add_ranks(table: "pd.DataFrame") -> "pd.DataFrame":
    """The comparison with columns `rank` and `reported_rank`, within a data set, network and alpha.

    Both are among the same rows, so that they compare: those that have a measured and a reported
    value. In a section where nothing is reported, `rank` is among all measured rows. A row that
    lost runs to divergence has none.
    """
    table = table.assign(rank=math.nan, reported_rank=math.nan)
    for _, section in _sections(table):
        rows = section[_comparable(section)]
        if section["reported_mean"].isna().all():
            rows = section[section["diverged"] == 0]
        else:
            table.loc[rows.index, "reported_rank"] = ranks(rows["reported_mean"])
        table.loc[rows.index, "rank"] = ranks(rows["mean"])
    return table


@door
def rank_correlations(table: "pd.DataFrame") -> list[RankCorrelation]:
    """Spearman's rank correlation in each section of a comparison that has at least three methods
    with both values, and where neither are all the same."""
    from scipy import stats

    correlations = []
    for place, section in _sections(table):
        both = section[_comparable(section)]
        measured, reported = (both[name].round(_DIGITS) for name in ("mean", "reported_mean"))
        if len(both) >= _FEWEST and measured.nunique() > 1 and reported.nunique() > 1:
            rho = float(stats.spearmanr(measured, reported).statistic)
            correlations.append(RankCorrelation(describe_settings(place), rho, len(both)))
    return correlations


def _sections(table: "pd.DataFrame") -> list[tuple[dict, "pd.DataFrame"]]:
    names = ["dataset", "model", "alpha"]
    require_columns("table", table, (*names, "mean", "reported_mean", "diverged"))
    groups = table.groupby(names, sort=False, dropna=False)
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in groups]


def _comparable(section: "pd.DataFrame") -> "pd.Series":
    there = section["mean"].notna() & section["reported_mean"].notna()
    return there & (section["diverged"] == 0)
