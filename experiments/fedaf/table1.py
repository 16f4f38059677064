"""FedAF's Table 1: methods against label skew, on three data sets.

python experiments/fedaf/table1.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/table1.py --preset paper   10 clients, 20 rounds, ConvNet 128: a GPU's work
python experiments/fedaf/table1.py --preset cpu     Fashion-MNIST, smaller: 2 hours on 2 cores

Its learning curves are the paper's Figure 3 (`fig3.py`). Tables 1 and 3 to 6 share a folder of
results, so that no run is made twice: Table 1's `fedaf` on CIFAR-10 is Table 3's `fedaf(ipc=50)`.
"""

from fedjax_het.experiment import Experiment, Preset, main

ALPHAS = (0.02, 0.05, 0.1)
# Five clients leave each about 290 of the 1,438 digits, and of 8x8 pixels; so a small network, few
# steps and small batches do.
QUICK = {
    "settings": {"num_clients": 5, "local_epochs": 5, "rounds": 6},
    "model_settings": {"convnet": {"width": 16, "depth": 2}},
    "method_settings": {
        method: {"batch_size": 64, "options": {"ipc": 10, "steps": 100, "server_epochs": 100}}
        for method in ("feddm", "fedaf")
    },
}

# Two fifths of the images, a fifth of the steps on them, and about half of the server's. FedDM's
# ball is as wide as for the paper's network of 40 times the parameters: it shakes this one harder.
CPU = {
    "batch_size": 128,
    "options": {"ipc": 20, "steps": 200, "server_epochs": 200, "server_batch_size": 64},
}

TABLE1 = Experiment(
    name="fedaf-table1",
    folder="fedaf",
    paper="fedaf",
    item="table1",
    title="FedAF, Table 1: best test accuracy of the global model.",
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("convnet",),
            alphas=ALPHAS,
            seeds=(0, 1),
            **QUICK,
        ),
        "cpu": Preset(
            datasets=("fashion_mnist",),
            models=("convnet",),
            alphas=(0.02, 0.1),
            seeds=(0,),
            settings={"rounds": 8, "width": 16},
            method_settings={method: CPU for method in ("feddm", "fedaf")},
        ),
        "paper": Preset(
            datasets=("fashion_mnist", "cifar10", "cifar100"),
            models=("convnet",),
            alphas=ALPHAS,
            seeds=(0, 1, 2),
        ),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(TABLE1))
