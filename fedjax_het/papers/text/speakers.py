"""Language model of characters whose clients are the speakers of Shakespeare's plays.

python experiments/text/speakers.py                a small network, two minutes on 2 cores
python experiments/text/speakers.py --preset cpu   five seeds, half an hour on one core

Each of the 20 clients has the lines of one speaker, of the data set `speakers`. The network
predicts each character from the characters before it. A curve is the accuracy against the rounds.
All rows are tuned with equal budgets, on a seed that no row averages.
"""

from fedjax_het.papers.table import Preset, TableDeclaration, make_table_program
from fedjax_het.tuning.tuner import DEFAULT_BUDGET

METHODS = ("fedavg", "fedprox", "scaffold", "ditto")

SPEAKERS = TableDeclaration(
    name="speakers",
    paper="fedamp",
    item="speakers",
    title="Next characters by speaker.",
    has_reported_values=False,
    protocol="standard",
    main_method="fedavg",
    budget=DEFAULT_BUDGET,
    search_space={"local_lr": (0.5, 10.0)},
    settings={
        **{"partition": "natural", "client_tests": True},
        **{"momentum": 0.0, "local_epochs": 1, "batch_size": 10},
    },
    presets={
        "quick": Preset(
            datasets=("speakers",),
            models=("gru",),
            seeds=(0,),
            rows=METHODS,
            settings={"rounds": 9, "network_options": {"hidden": 32, "layers": 1}},
        ),
        "cpu": Preset(
            datasets=("speakers",),
            models=("gru",),
            seeds=(0, 1, 2, 3, 4),
            rows=METHODS,
            settings={
                **{"rounds": 100, "eval_every": 5},
                "network_options": {"hidden": 64, "layers": 1},
            },
        ),
    },
)
main = make_table_program(SPEAKERS)
