"""Reported values of the papers, cell by cell: one CSV file per paper.

Columns: `paper`, `item` (`table1`, ...), `dataset`, `model`, `partition`, `level`, `clients`,
`participation`, `local_epochs`, `rounds`, `method`, `metric`, `mean`, `std`. The level is the
Dirichlet alpha, the number of labels per client, or a domain. Names follow this package; a value
that a paper does not state (its network, a level) is empty. Accuracies are percentages. The files
contain no measured values.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedjax_het.utils.errors import require_name

if TYPE_CHECKING:
    import pandas as pd

_REPORTED_FOLDER = Path(__file__).parent


@cache
def _read_paper(paper: str) -> "pd.DataFrame":
    import pandas as pd

    return pd.read_csv(_REPORTED_FOLDER / f"{paper}.csv")


def load_reported_values(paper: str, item: str | None = None) -> "pd.DataFrame":
    """Load the values that a paper reports, in the paper's order.

    Args:
      paper: name of the paper, for example "dynafed".
      item: a table or figure, for example "table1"; default: all.

    Returns:
      One row per value with the columns described in this module.

    Raises:
      ConfigError: if the paper or the item is unknown; the message lists the valid names.

    Example:
      >>> from fedjax_het.papers.reported import load_reported_values
      >>> values = load_reported_values("dynafed", "table1")
      >>> values[["dataset", "level", "method", "mean"]].to_numpy().tolist()[0]
      ['fashion_mnist', 0.01, 'fedavg', 74.5]
    """
    import pandas as pd

    require_name("paper", paper, sorted(path.stem for path in _REPORTED_FOLDER.glob("*.csv")))
    values = _read_paper(paper)
    if item is None:
        return values
    require_name("item", item, list(dict.fromkeys(values["item"])))
    item_values = values[values["item"] == item].reset_index(drop=True)
    # The levels of another item may be names, so that all are read as texts.
    levels = pd.to_numeric(item_values["level"], errors="coerce")
    return item_values.assign(level=levels) if levels.notna().all() else item_values
