"""DynaFed's Table 1: methods against heterogeneity, on three data sets of ten classes.

    python experiments/table1.py                  the embedded digits, minutes on 2 cores
    python experiments/table1.py --preset paper   80 clients, 200 rounds, ConvNet 128: a GPU's work

Every method that trains one global model is a row. `--help` lists the filters.
"""

from fedjax_het.experiment import Experiment, Preset, main

ALPHAS = (0.01, 0.04, 0.16)

TABLE1 = Experiment(
    name="table1",
    paper="dynafed",
    item="table1",
    title="DynaFed, Table 1: test accuracy of the global model.",
    note="The paper does not say whether its ± is over seeds or over the last five rounds.",
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("mlp",),
            alphas=ALPHAS,
            seeds=(0, 1),
            settings={"num_clients": 20, "local_epochs": 5, "rounds": 40},
            method_settings={"dynafed": {"options": {"num_iterations": 200}}},
        ),
        "paper": Preset(
            datasets=("fashion_mnist", "cifar10", "cinic10"),
            models=("convnet",),
            alphas=ALPHAS,
            seeds=(0, 1, 2),
        ),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(TABLE1))
