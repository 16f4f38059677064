"""DynaFed's Table 5: two networks on Fashion-MNIST, 80 clients, 200 rounds.

python experiments/dynafed/table5.py --models mlp   the MLP columns, minutes a run on 2 cores
python experiments/dynafed/table5.py                both networks; the ConvNet is a GPU's work
"""

from fedjax_het.experiment import Experiment, Preset, main

# The paper leaves open how strongly the average is fine-tuned, and its code has no script for this
# data set. At the code's 1e-4 (for CIFAR-10) the synthetic data hardly act on the MLP; 1e-3 was
# chosen on seed 0 at alpha 0.01, as was switching off the augmentation, and the code's shorter
# segments with targets averaged over 2 or 3 rounds. Iterations as in the paper.
DYNAFED = {
    "hp": {"fine_tune_lr": 1e-3},
    "options": {"preset": "code", "num_iterations": 1000, "augment_strategy": "none"},
}

TABLE5 = Experiment(
    name="dynafed-table5",
    paper="dynafed",
    item="table5",
    title="DynaFed, Table 5: test accuracy of the global model, two networks.",
    note="The paper does not say whether its ± is over seeds or over the last five rounds.",
    presets={
        "paper": Preset(
            datasets=("fashion_mnist",),
            models=("mlp", "convnet"),
            alphas=(0.01, 0.04),
            seeds=(0, 1, 2),
            method_settings={"dynafed": DYNAFED},
        ),
        "quick": Preset(
            datasets=("digits",),
            models=("mlp", "convnet"),
            alphas=(0.01, 0.04),
            seeds=(0, 1),
            settings={"num_clients": 20, "local_epochs": 5, "rounds": 40},
            model_settings={"convnet": {"width": 16}},
            method_settings={"dynafed": {"options": {"num_iterations": 200}}},
        ),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(TABLE5))
