"""DynaFed's Table 5: two networks on Fashion-MNIST, 80 clients, 200 rounds.

python experiments/dynafed/table5.py --models mlp   the MLP columns, minutes a run on 2 cores
python experiments/dynafed/table5.py                both networks; the ConvNet is a GPU's work

Its configuration is that of Table 1, of which the ConvNet's columns are a part. Rows besides have
the settings of the public code, with controls of their own.
"""

from dataclasses import replace
from typing import Any

from fedjax_het.papers.dynafed.settings import (
    CODE_CONTROLS,
    CODE_ROW,
    CONTROLS,
    EXPERIMENT,
    NOTE,
    PAPER,
    QUICK,
    ROWS,
)
from fedjax_het.papers.table import make_table_program

DYNAFED_ROWS = ("dynafed", CODE_ROW, *CONTROLS)
NETWORKS: dict[str, Any] = {
    "models": ("mlp", "convnet"),
    "alphas": (0.01, 0.04),
    "rows": (*dict.fromkeys((*ROWS, *DYNAFED_ROWS, *CODE_CONTROLS)),),
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
            note="The ConvNet, of width 8 and with three poolings of 8x8 pixels, stays near chance "
            "in these 40 rounds whatever the method: its rows show that it runs.",
        ),
    },
)

main = make_table_program(TABLE5)
