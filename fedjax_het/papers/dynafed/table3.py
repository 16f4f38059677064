"""DynaFed's Table 3: longer local training in fewer rounds.

python experiments/dynafed/table3.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/table3.py --preset paper   CIFAR-10: a GPU's work

`fedavg(local_epochs=5, rounds=100)` is the paper's column of 5 local epochs; that of 10 has 50
rounds. The paper does not say how long DynaFed's trajectory is there: 20 rounds, as elsewhere.
"""

from dataclasses import replace
from itertools import product

import pandas as pd

from fedjax_het.analysis import parse_row
from fedjax_het.papers.dynafed.settings import (
    CONTROLS,
    EXPERIMENT,
    METHOD_SETTINGS,
    NOTE,
    PAPER,
    QUICK,
    ROWS,
)
from fedjax_het.papers.table import TableRun, make_table_program, write_comparison_table


def format_row(row: str, local_epochs: int, rounds: int) -> str:
    method, variant = parse_row(row)
    settings = {**variant, "local_epochs": local_epochs, "rounds": rounds}
    return f"{method}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def make_rows(*lengths: tuple[int, int]) -> tuple[str, ...]:
    return tuple(format_row(row, *length) for length, row in product(lengths, (*ROWS, *CONTROLS)))


TABLE3 = EXPERIMENT(
    name="dynafed-table3",
    item="table3",
    title="DynaFed, Table 3: test accuracy of the global model after longer local training.",
    note=NOTE,
    presets={
        "quick": replace(
            QUICK,
            alphas=(0.01,),
            seeds=(0,),
            rows=make_rows((10, 30)),
            method_settings={
                **METHOD_SETTINGS,
                "dynafed": {"options": {"num_iterations": 200, "trajectory_rounds": 10}},
            },
        ),
        "paper": replace(PAPER, alphas=(0.01, 0.04), rows=make_rows((5, 100), (10, 50))),
    },
)


def rename_reported_rows(reported: pd.DataFrame) -> pd.DataFrame:
    """The reported values by rows that say how long clients train."""
    lengths = reported[["method", "local_epochs", "rounds"]].itertuples(index=False)
    return reported.assign(method=[format_row(*length) for length in lengths])


def write_outputs(table_run: TableRun) -> list[str]:
    return write_comparison_table(
        table_run._replace(reported=rename_reported_rows(table_run.reported))
    )


main = make_table_program(TABLE3, write_outputs)
