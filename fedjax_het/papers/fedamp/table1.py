"""FedAMP's Table 1: personalised methods where clients' data are alike (IID).

python experiments/fedamp/table1.py                  the embedded digits, a minute on 2 cores
python experiments/fedamp/table1.py --preset short   Fashion-MNIST, MLP, 25 clients: ten minutes
python experiments/fedamp/table1.py --preset cpu     both MNISTs, MLP, 100 clients: an hour
python experiments/fedamp/table1.py --preset paper   the four data sets: a GPU's work

The score is BMTA: the mean over clients, each tested on data like its own, in the best round. Rows
are the paper's nine methods, then three that it does not have. Tables 1 to 3 and Figures 2 and 3
share a folder of results: both figures are drawn from the runs of Table 3.
"""

from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import Preset, TableDeclaration, make_table_program

ROWS = (
    *dict.fromkeys(load_reported_values("fedamp", "table1")["method"]),
    "ditto",
    "pfedme",
    "per_fedavg",
)
NOTE = (
    "The paper's numbers of clients and rounds, networks, learning rates and all else of training "
    "are in an appendix that was not available, and chosen here: compare ranks, not values."
)
FINE_TUNING_SETTINGS = {
    method: {"options": {"tuning_epochs": 2}} for method in ("fedavg_ft", "fedprox_ft")
}
# What `--tuned` tunes of each method.
TUNING = {
    "separate": "local_lr",
    "fedavg": "local_lr",
    "fedprox": "prox_mu",
    "fedavg_ft": "local_lr",
    "fedprox_ft": "prox_mu",
    "scaffold": "local_lr",
    "apfl": "local_lr",
    "fedamp": "sigma",
    "heurfedamp": "sigma",
    "ditto": "ditto_lambda",
    "pfedme": "pfedme_lambda",
    "per_fedavg": "inner_lr",
}
PRESETS = {
    # Fifteen clients have 96 of the 1,438 digits each, or fewer in groups. 20 tests for each are
    # 300 of the 359 test images, so that hardly any are in two clients' tests.
    "quick": Preset(
        datasets=("digits",),
        models=("mlp",),
        seeds=(0, 1),
        rows=ROWS,
        settings={
            "num_clients": 15,
            "rounds": 20,
            "test_per_client": 20,
            "hp": {"local_lr": 0.1},
        },
    ),
    "short": Preset(
        datasets=("fashion_mnist",),
        models=("mlp",),
        seeds=(0, 1, 2),
        rows=ROWS,
        settings={
            "num_clients": 25,
            "local_epochs": 2,
            "rounds": 20,
            "hp": {"local_lr": 0.1},
        },
        method_settings=FINE_TUNING_SETTINGS,
    ),
    "cpu": Preset(
        datasets=("fashion_mnist", "mnist"),
        models=("mlp",),
        seeds=(0, 1, 2),
        rows=ROWS,
        settings={
            "num_clients": 100,
            "local_epochs": 2,
            "rounds": 40,
            "hp": {"local_lr": 0.1},
        },
        method_settings=FINE_TUNING_SETTINGS,
    ),
    "paper": Preset(
        datasets=("mnist", "fashion_mnist", "emnist_byclass", "cifar100"),
        models=("cnn",),
        seeds=(0,),
        rows=ROWS,
    ),
}

TABLE1 = TableDeclaration(
    name="fedamp-table1",
    results_folder="fedamp",
    paper="fedamp",
    item="table1",
    title="FedAMP, Table 1: best mean test accuracy of clients, IID data.",
    presets=PRESETS,
    settings={"partition": "iid"},
    main_method="fedamp",
    tuned_hyperparameters=TUNING,
    note=NOTE,
)

main = make_table_program(TABLE1)
