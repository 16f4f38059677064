"""FedAMP's Tables 1 to 3: personalized methods on three kinds of partitions.

The score is BMTA: the mean over clients in the best round, each tested on data like its training
data. Rows are the paper's nine methods, then three that it does not have. Tables 1 to 3 and Figures
2 and 3 share a folder of results: both figures are drawn from the runs of Table 3.
"""

from dataclasses import replace
from typing import Any

from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import Preset, TableDeclaration, make_table_program

ROWS = (
    *dict.fromkeys(load_reported_values("fedamp", "table1")["method"]),
    "ditto",
    "pfedme",
    "per_fedavg",
)


def _make_short_preset(datasets: tuple[str, ...], num_clients: int, rounds: int) -> Preset:
    settings: dict[str, Any] = {"num_clients": num_clients, "local_epochs": 2, "rounds": rounds}
    fine_tuning = {"options": {"tuning_epochs": 2}}
    return Preset(
        datasets=datasets,
        models=("mlp",),
        seeds=(0, 1, 2),
        rows=ROWS,
        settings={**settings, "hp": {"local_lr": 0.1}},
        method_settings={"fedavg_ft": fine_tuning, "fedprox_ft": fine_tuning},
    )


# Fifteen clients have 96 of the 1,438 digits each, or fewer in groups. With 20 tests for each, 300
# of the 359 test images are used, so few images are in two clients' tests.
QUICK = Preset(
    datasets=("digits",),
    models=("mlp",),
    seeds=(0, 1),
    rows=ROWS,
    settings={"num_clients": 15, "rounds": 20, "test_per_client": 20, "hp": {"local_lr": 0.1}},
)
TABLE1 = TableDeclaration(
    name="fedamp-table1",
    results_folder="fedamp",
    paper="fedamp",
    item="table1",
    title="FedAMP, Table 1: best mean test accuracy of clients, IID data.",
    presets={
        "quick": QUICK,
        "short": _make_short_preset(("fashion_mnist",), 25, 20),
        "cpu": _make_short_preset(("fashion_mnist", "mnist"), 100, 40),
        "paper": Preset(
            datasets=("mnist", "fashion_mnist", "emnist_byclass", "cifar100"),
            models=("cnn",),
            seeds=(0,),
            rows=ROWS,
        ),
    },
    settings={"partition": "iid"},
    main_method="fedamp",
    note="The paper's numbers of clients and rounds, networks, learning rates and other training "
    "settings are in an appendix that was not available. They are chosen here: compare ranks, not "
    "values.",
)
table1 = make_table_program(TABLE1)
"""FedAMP's Table 1: personalized methods on clients with IID data.

    python experiments/fedamp/table1.py                  the embedded digits, a minute on 2 cores
    python experiments/fedamp/table1.py --preset short   Fashion-MNIST, MLP, 25 clients: ten minutes
    python experiments/fedamp/table1.py --preset cpu     both MNISTs, MLP, 100 clients: an hour
    python experiments/fedamp/table1.py --preset paper   the four data sets: a GPU's work
"""

TABLE2 = replace(
    TABLE1,
    name="fedamp-table2",
    item="table2",
    title="FedAMP, Table 2: best mean test accuracy of clients, two classes each (pathological).",
    settings={"partition": "pathological"},
)
table2 = make_table_program(TABLE2)
"""FedAMP's Table 2: personalized methods on clients with two classes each (pathological).

    python experiments/fedamp/table2.py                  the embedded digits, a minute on 2 cores
    python experiments/fedamp/table2.py --preset short   Fashion-MNIST, MLP, 25 clients: ten minutes
    python experiments/fedamp/table2.py --preset cpu     both MNISTs, MLP, 100 clients: an hour
    python experiments/fedamp/table2.py --preset paper   the four data sets: a GPU's work
"""

# The sizes of groups 1000, 700, 400, 1000, 700 at 9 %: the digits allow no more.
SIZES = {"partition_options": {"group_sizes": [90, 63, 36, 90, 63]}}
TABLE3 = replace(
    TABLE1,
    name="fedamp-table3",
    item="table3",
    title="FedAMP, Table 3: best mean test accuracy of clients, in groups (practical non-IID).",
    settings={"partition": "grouped"},
    presets={
        **TABLE1.presets,
        "quick": replace(QUICK, settings={**QUICK.settings, **SIZES}),
        "short": replace(TABLE1.presets["short"], datasets=("fashion_mnist", "mnist")),
    },
)
table3 = make_table_program(TABLE3)
"""FedAMP's Table 3: personalized methods on groups of clients (practical non-IID data).

    python experiments/fedamp/table3.py                  the embedded digits, a minute on 2 cores
    python experiments/fedamp/table3.py --preset short   both MNISTs, MLP, 25 clients: half an hour
    python experiments/fedamp/table3.py --preset cpu     both MNISTs, MLP, 100 clients: an hour
    python experiments/fedamp/table3.py --preset paper   the four data sets: a GPU's work

A group's dominating classes make up 80 % of its clients' data. EMNIST's groups and sizes are the
paper's. The groups and sizes of other data sets are declared in
`fedjax_het.data.grouped_partition`. Figures 2 and 3 are drawn from the same runs.
"""
