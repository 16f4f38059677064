"""DynaFed's Table 5: two networks on Fashion-MNIST, 80 clients, 200 rounds.

python experiments/dynafed/table5.py --models mlp   the MLP columns, minutes a run on 2 cores
python experiments/dynafed/table5.py                both networks; the ConvNet is a GPU's work
"""

from dataclasses import replace
from typing import Any

from experiments.dynafed.settings import EXPERIMENT, NOTE, PAPER, QUICK
from fedjax_het.report.paper_table import program

NETWORKS: dict[str, Any] = {"models": ("mlp", "convnet"), "alphas": (0.01, 0.04)}

# The paper leaves open how strongly the average is fine-tuned, and its code has no script for this
# data set. At the code's 1e-4 (for CIFAR-10) the synthetic data hardly act on the MLP; 1e-3 was
# chosen on seed 0 at alpha 0.01, as was switching off the augmentation, and the code's shorter
# segments with targets averaged over 2 or 3 rounds. Iterations as in the paper.
DYNAFED = {
    "hp": {"fine_tune_lr": 1e-3},
    "options": {"preset": "code", "num_iterations": 1000, "augment_strategy": "none"},
}

TABLE5 = EXPERIMENT(
    name="dynafed-table5",
    item="table5",
    title="DynaFed, Table 5: test accuracy of the global model, two networks.",
    note=NOTE,
    presets={
        "paper": replace(
            PAPER,
            datasets=("fashion_mnist",),
            method_settings={**PAPER.method_settings, "dynafed": DYNAFED},
            **NETWORKS,
        ),
        "quick": replace(QUICK, model_settings={"convnet": {"width": 16}}, **NETWORKS),
    },
)

main = program(TABLE5)

if __name__ == "__main__":
    raise SystemExit(main())
