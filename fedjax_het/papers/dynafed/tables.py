"""DynaFed's Tables 1, 2, 3, 5 and 6, and the learning curves of Figures 2 and 7.

Rows are the paper's nine methods with the controls of `dynafed.settings`; `--help` lists the
filters. Tables 1 and 2 and Figure 2 share a folder of results, so that no run is made twice.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import add_row_settings
from fedjax_het.papers.dynafed.settings import (
    CODE_CONTROLS,
    CODE_ROW,
    CONTROLS,
    CPU,
    EXPERIMENT,
    FOLDER,
    METHOD_SETTINGS,
    NOTE,
    PAPER,
    QUICK,
    ROWS,
    SETTINGS,
)
from fedjax_het.papers.fedaf.settings import QUICK as QUICK_OF_FEDAF
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import (
    TableRun,
    make_curves_writer,
    make_table_program,
    write_comparison_table,
)

# Methods with one global model that is tested on all test images.
GLOBAL_METHODS = tuple(
    name for name, entry in METHODS.items() if entry.has_global_model and not entry.is_personalized
)
EXTRA_METHODS = tuple(name for name in GLOBAL_METHODS if name not in ROWS)
TABLE1 = EXPERIMENT(
    name=FOLDER,
    item="table1",
    title="DynaFed, Table 1: test accuracy of the global model.",
    note=NOTE,
    presets={
        "quick": replace(
            QUICK,
            optional_rows=EXTRA_METHODS,
            note="FedDM and FedAF have the settings of FedAF's quick tables: a client condenses a "
            "class if it has ten images of it, in 60 steps instead of the papers' 1,000. That is "
            "for clients that are far apart: at alpha 0.16 neither is above FedAvg.",
            note_methods=("feddm", "fedaf"),
            method_settings=QUICK.method_settings | QUICK_OF_FEDAF["method_settings"],
        ),
        "cpu": replace(CPU, datasets=("fashion_mnist", "cifar10")),
        "paper": replace(
            PAPER,
            datasets=("fashion_mnist", "cifar10", "cinic10"),
            optional_rows=EXTRA_METHODS,
        ),
    },
)
table1 = make_table_program(TABLE1)
"""DynaFed's Table 1: methods against heterogeneity, on three data sets of ten classes.

    python experiments/table1.py                  the embedded digits, minutes on 2 cores
    python experiments/table1.py --methods all    every method that trains one global model
    python experiments/table1.py --preset cpu     Fashion-MNIST, width 32: FedAvg 10 minutes a run,
                                                  DynaFed two hours
    python experiments/table1.py --preset paper   80 clients, 200 rounds, ConvNet 128: a GPU's work
"""

ALPHAS = (0.01, 0.04, 0.08, 0.16)
TABLE2 = EXPERIMENT(
    name="dynafed-table2",
    results_folder=FOLDER,
    item="table2",
    title="DynaFed, Table 2: test accuracy of the global model, a hundred classes.",
    note=NOTE,
    presets={
        "quick": replace(QUICK, alphas=ALPHAS),
        "paper": replace(PAPER, datasets=("cifar100",), alphas=ALPHAS),
    },
)
table2 = make_table_program(TABLE2)
"""DynaFed's Table 2: a hundred classes.

    python experiments/dynafed/table2.py                  the embedded digits, a minute on 2 cores
    python experiments/dynafed/table2.py --preset paper   CIFAR-100: a GPU's work

The digits have ten classes. Their preset shows that the table works, with one alpha more than Table
1. DynaFed has 1,500 synthetic samples of CIFAR-100, as in its public code; the paper says 150
without an exception for this data set.
"""

SMALL_ALPHAS = (0.01, 0.04)
FIG2 = replace(
    TABLE2,
    name="dynafed-fig2",
    title="DynaFed, Figure 2: learning curves.",
    presets={
        "quick": replace(QUICK, alphas=SMALL_ALPHAS),
        "paper": replace(
            PAPER,
            datasets=("fashion_mnist", "cifar10", "cinic10", "cifar100"),
            alphas=SMALL_ALPHAS,
        ),
    },
)


def _write_fig2(table_run: TableRun) -> list[str]:
    reported = pd.concat([load_reported_values("dynafed", item) for item in ("table1", "table2")])
    return make_curves_writer("fig2")(table_run._replace(reported=reported))


fig2 = make_table_program(FIG2, _write_fig2)
"""DynaFed's Figure 2: the learning curves of Tables 1 and 2 at the two smallest alphas.

    python experiments/dynafed/fig2.py                  the embedded digits, a minute on 2 cores
    python experiments/dynafed/fig2.py --preset paper   four data sets: a GPU's work

Makes the missing runs of these tables, in their folder; `--show` draws the available ones.
"""


def _make_table3_rows(*lengths: tuple[int, int]) -> tuple[str, ...]:
    """Return the rows for pairs of local epochs and rounds."""
    return tuple(
        add_row_settings(row, local_epochs=local_epochs, rounds=rounds)
        for (local_epochs, rounds), row in product(lengths, (*ROWS, *CONTROLS))
    )


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
            rows=_make_table3_rows((10, 30)),
            method_settings={
                **METHOD_SETTINGS,
                "dynafed": {"options": {"num_iterations": 200, "trajectory_rounds": 10}},
            },
        ),
        "paper": replace(PAPER, alphas=SMALL_ALPHAS, rows=_make_table3_rows((5, 100), (10, 50))),
    },
)


def rename_reported_rows(reported: pd.DataFrame) -> pd.DataFrame:
    """Return the reported values of Table 3 with the length of local training in their rows."""
    rows = reported[["method", "local_epochs", "rounds"]].itertuples(index=False)
    names = [add_row_settings(row, local_epochs=epochs, rounds=n) for row, epochs, n in rows]
    return reported.assign(method=names)


def _write_table3(table_run: TableRun) -> list[str]:
    reported = rename_reported_rows(table_run.reported)
    return write_comparison_table(table_run._replace(reported=reported))


table3 = make_table_program(TABLE3, _write_table3)
"""DynaFed's Table 3: longer local training in fewer rounds.

    python experiments/dynafed/table3.py                  the embedded digits, a minute on 2 cores
    python experiments/dynafed/table3.py --preset paper   CIFAR-10: a GPU's work

`fedavg(local_epochs=5, rounds=100)` is the paper's column of 5 local epochs; the column of 10 local
epochs has 50 rounds. The paper does not state the length of DynaFed's trajectory in this table: it
is 20 rounds, as elsewhere.
"""

NETWORKS: dict[str, Any] = {
    "models": ("mlp", "convnet"),
    "alphas": SMALL_ALPHAS,
    "rows": tuple(dict.fromkeys((*ROWS, "dynafed", CODE_ROW, *CONTROLS, *CODE_CONTROLS))),
}
TABLE5 = EXPERIMENT(
    name="dynafed-table5",
    item="table5",
    title="DynaFed, Table 5: test accuracy of the global model, two networks.",
    note=NOTE,
    presets={
        "paper": replace(PAPER, datasets=("fashion_mnist",), **NETWORKS),
        "quick": replace(
            QUICK,
            models=NETWORKS["models"],
            alphas=(0.01,),
            seeds=(0,),
            rows=("fedavg", "dynafed", *CONTROLS),
            optional_rows=(CODE_ROW, *CODE_CONTROLS),
            model_settings={"convnet": {"width": 8}},
            note="The ConvNet has width 8 and three poolings of 8x8 pixels. It stays near chance "
            "in these 40 rounds with every method; its rows only show that it runs.",
        ),
    },
)
table5 = make_table_program(TABLE5)
"""DynaFed's Table 5: two networks on Fashion-MNIST, 80 clients, 200 rounds.

    python experiments/dynafed/table5.py --models mlp   the MLP columns, minutes a run on 2 cores
    python experiments/dynafed/table5.py                both networks; the ConvNet is a GPU's work

The configuration follows Table 1, which includes the ConvNet's columns. Further rows have the
settings of the public code, with their own controls.
"""

TABLE6 = EXPERIMENT(
    name="dynafed-table6",
    item="table6",
    title="DynaFed, Table 6: test accuracy of the global model, a fifth of the clients a round.",
    note=NOTE,
    settings={**SETTINGS, "participation": 0.2},
    presets={"quick": replace(QUICK, alphas=SMALL_ALPHAS, seeds=(0,)), "paper": PAPER},
)
table6 = make_table_program(TABLE6)
"""DynaFed's Table 6: a fifth of the clients in each round.

    python experiments/dynafed/table6.py                  the embedded digits, a minute on 2 cores
    python experiments/dynafed/table6.py --preset paper   CIFAR-10, 16 of 80 clients: a GPU's work

Figure 7 has the learning curves of the same runs.
"""

FIG7 = replace(TABLE6, title="DynaFed, Figure 7: learning curves, a fifth of the clients a round.")
fig7 = make_table_program(FIG7, make_curves_writer("fig7"))
"""DynaFed's Figure 7: the learning curves of Table 6, from the same runs.

    python experiments/dynafed/fig7.py                  the embedded digits, a minute on 2 cores
    python experiments/dynafed/fig7.py --preset paper   CIFAR-10: a GPU's work

Makes the missing runs of Table 6; `--show` draws the available ones.
"""
