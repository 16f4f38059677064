"""FedAF's Tables 1 to 6, and the learning curves of Figures 3 and 4.

Tables 1 and 3 to 6 share a folder of results, so that no run is made twice: Table 1's `fedaf` on
CIFAR-10 is Table 3's `fedaf(ipc=50)`.
"""

from dataclasses import replace
from typing import Any

from fedjax_het.analysis import parse_row
from fedjax_het.papers.fedaf.domains import DOMAINS, make_digit_domains
from fedjax_het.papers.fedaf.settings import (
    CONTROLS,
    EXPERIMENT,
    MLP,
    PRESETS,
    QUICK,
    add_control_rows,
    condensing_method_settings,
)
from fedjax_het.papers.table import Preset, make_curves_writer, make_table_program

CIFAR10 = replace(PRESETS["paper"], datasets=("cifar10",))

BASELINES = (
    "fedavg",
    "fedprox",
    "fedbn",
    "fedbn(client_test_model='personal')",
    "moon",
    "feddyn",
    "fedgen",
)
_NOTES = {
    "quick": "On the digits, with 8x8 pixels and about 290 images a client, FedDM and FedAF are "
    "above FedAvg at alpha 0.02 and below it at 0.1, unlike in the paper. Their rows with equally "
    "many random real images are also below FedAvg at 0.1: clients send too few images, however "
    "they are matched. A client condenses a class if it has ten images of it, in 60 steps instead "
    "of the paper's 1,000."
}


def _parse_table1_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Test clients' own models on all test images, if a row evaluates them."""
    method, variant = parse_row(row)
    if "client_test_model" in variant:
        variant |= {"client_tests": True, "test_per_client": "all"}
    return method, variant


TABLE1 = EXPERIMENT(
    name="fedaf-table1",
    results_folder="fedaf",
    item="table1",
    title="FedAF, Table 1: best test accuracy of the global model.",
    presets={
        name: replace(
            preset,
            rows=(*BASELINES, "feddm", "fedaf", *CONTROLS["feddm"], *CONTROLS["fedaf"]),
            note=_NOTES.get(name, ""),
        )
        for name, preset in PRESETS.items()
    },
    row_parser=_parse_table1_row,
    note="FedBN: the mean of the clients' networks with the mean of their normalization layers. "
    "FedBN (personal): with every client's own layers, mean over clients of the accuracy on all "
    "test images. The paper does not state which it has.",
)
table1 = make_table_program(TABLE1)
"""FedAF's Table 1: methods against label skew, on three data sets.

    python experiments/fedaf/table1.py                  the embedded digits, minutes on 2 cores
    python experiments/fedaf/table1.py --preset paper   10 clients, 20 rounds, ConvNet 128; on a GPU
    python experiments/fedaf/table1.py --preset cpu     Fashion-MNIST at .02, width 16, all else as
                                                        in the paper: on a core of an EPYC 4 hours
                                                        for FedAF, four for FedDM, one for a control
    python experiments/fedaf/table1.py --preset short   Fashion-MNIST, fewer rounds and steps; 2 h

The paper gives all methods SGD with momentum 0.9, and of the baselines FedProx's mu (0.001), MOON's
(1) and FedDyn's alpha (0.01). It leaves these settings open, which are chosen here:

MOON    no projection head, so that all train the same network; temperature 0.5, its code's
FedDyn  its Algorithm 1, momentum on top of the corrected gradient; clients weighted by samples, as
        for all methods
FedGen  the sizes, weights and rates of its code for CIFAR, on every data set; the generator makes
        the features that the ConvNet's classifier reads
FedBN   has no model for a common test. Row `fedbn` is the mean of the clients' networks with the
        mean of their normalization layers, which FedAvg would test. The paper does not have row
        `fedbn(client_test_model='personal')`: the mean over clients of the accuracy, on the whole
        test split, of the mean network with the client's own layers.
"""

FIG3 = replace(
    TABLE1,
    title="FedAF, Figure 3: learning curves.",
    presets={
        **TABLE1.presets,
        "paper": replace(
            TABLE1.presets["paper"], datasets=("cifar10", "cifar100", "fashion_mnist")
        ),
    },
)
fig3 = make_table_program(FIG3, make_curves_writer("fig3"))
"""FedAF's Figure 3: the learning curves of Table 1, from the same runs.

    python experiments/fedaf/fig3.py                  the embedded digits, minutes on 2 cores
    python experiments/fedaf/fig3.py --preset paper   a GPU's work

Makes the missing runs of Table 1; `--show` draws the available ones.
"""


def _parse_table2_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Test each client of FedBN, which is a domain, with its own normalization layers."""
    method, variant = parse_row(row)
    return method, variant | ({"client_tests": True} if method == "fedbn" else {})


TABLE2 = EXPERIMENT(
    name="fedaf-table2",
    item="table2",
    title="FedAF, Table 2: test accuracy of the global model by domain.",
    note="FedBN: each domain's accuracy is its client's accuracy, with the averaged network and "
    "the client's normalization layers, since FedBN has no global model.",
    row_parser=_parse_table2_row,
    settings={"partition": "by_domain", "num_clients": 6, "rounds": 10},
    presets={
        "quick": add_control_rows(
            Preset(
                datasets=("user",),
                models=("convnet",),
                domains=DOMAINS,
                seeds=(0,),
                description="the embedded digits in six artificial domains, no images of DomainNet",
                make_dataset=make_digit_domains,
                settings={"local_epochs": 5, "rounds": 5},
                model_settings=QUICK["model_settings"],
                method_settings=condensing_method_settings(
                    batch_size=64, options={"ipc": 10, "steps": 50, "server_epochs": 100}
                ),
            ),
            "table2",
        ),
        "paper": add_control_rows(
            Preset(
                datasets=("domainnet",),
                models=("convnet",),
                domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
                seeds=(0, 1, 2),
            ),
            "table2",
        ),
    },
)
table2 = make_table_program(TABLE2)
"""FedAF's Table 2: feature skew, one client for each domain of DomainNet.

    python experiments/fedaf/table2.py                  six domains of the embedded digits, minutes
    python experiments/fedaf/table2.py --preset paper   DomainNet's ten classes at 64x64; on a GPU

The domains of preset quick are made up, see `fedaf.domains`: they show that the table works, but
not how methods do on DomainNet.

FedBN is evaluated as in FedBN's paper: a domain's accuracy is its client's accuracy, with the
averaged network and the client's own normalization layers. All other methods have one global model.
Settings that the paper leaves open follow Table 1.
"""

FIG4 = replace(TABLE2, title="FedAF, Figure 4: learning curves by domain.")
fig4 = make_table_program(FIG4, make_curves_writer("fig4"))
"""FedAF's Figure 4: the learning curves of Table 2, from the same runs.

    python experiments/fedaf/fig4.py                  six domains of the embedded digits, minutes
    python experiments/fedaf/fig4.py --preset paper   DomainNet: a GPU's work

Makes the missing runs of Table 2; `--show` draws the available ones.
"""

IPCS = ("fedaf(ipc=2)", "fedaf(ipc=5)", "fedaf(ipc=10)", "fedaf(ipc=20)")
TABLE3 = EXPERIMENT(
    name="fedaf-table3",
    results_folder="fedaf",
    item="table3",
    title="FedAF, Table 3: best test accuracy by condensed images per class.",
    real_data_rows={},  # these have the default number of images
    presets={
        "quick": add_control_rows(replace(PRESETS["quick"], rows=IPCS), "table3"),
        "paper": add_control_rows(CIFAR10, "table3"),
    },
)
table3 = make_table_program(TABLE3)
"""FedAF's Table 3: how many condensed images per class (IPC).

    python experiments/fedaf/table3.py                  the embedded digits, minutes on 2 cores
    python experiments/fedaf/table3.py --preset paper   CIFAR-10: a GPU's work

Classes that a client has fewer images of than the IPC are not condensed: a larger IPC drops more.
"""

TABLE4 = EXPERIMENT(
    name="fedaf-table4",
    results_folder="fedaf",
    item="table4",
    title="FedAF, Table 4: best test accuracy without parts of the method.",
    note="FedAF (lambda_loc 0) is without the condensation loss across clients (CDC), "
    "FedAF (lambda_glob 0) without the matching of soft labels (LGKM).",
    presets={
        "quick": add_control_rows(PRESETS["quick"], "table4"),
        "cpu": add_control_rows(PRESETS["cpu"], "table4"),
        "paper": add_control_rows(CIFAR10, "table4"),
    },
)
table4 = make_table_program(TABLE4)
"""FedAF's Table 4: without condensation across clients, without soft labels, without both.

    python experiments/fedaf/table4.py                  the embedded digits, minutes on 2 cores
    python experiments/fedaf/table4.py --preset cpu     Fashion-MNIST at .02, width 16: hours
    python experiments/fedaf/table4.py --preset paper   CIFAR-10: a GPU's work

`fedaf(lambda_loc=0)` is the paper's "w/o CDC", `fedaf(lambda_glob=0)` its "w/o LGKM".
"""

# The paper leaves out gamma 0, classic distribution matching. The last row is without the logits of
# random networks, which are compared with the trained model's.
GAMMAS = (
    *(f"fedaf(gamma={gamma})" for gamma in (0.9, 0.0, 0.2, 0.5, 0.8, 1.0)),
    "fedaf(gamma=0.0, lambda_loc=0)",
)
TABLE5 = EXPERIMENT(
    name="fedaf-table5",
    results_folder="fedaf",
    item="table5",
    title="FedAF, Table 5: best test accuracy by the re-sampling coefficient gamma.",
    settings={"rounds": 10},
    note="The paper gives no deviations here and does not state its number of seeds. "
    "It has no value of gamma 0, networks drawn at random.",
    presets={
        "quick": add_control_rows(replace(PRESETS["quick"], alphas=(0.1,), rows=GAMMAS), "table5"),
        "cpu": add_control_rows(
            replace(PRESETS["cpu"], rows=GAMMAS, settings={**PRESETS["cpu"].settings, "rounds": 4}),
            "table5",
        ),
        "short": add_control_rows(replace(MLP, rows=GAMMAS), "table5"),
        "paper": add_control_rows(replace(CIFAR10, alphas=(0.1,), rows=GAMMAS), "table5"),
    },
)
table5 = make_table_program(TABLE5)
"""FedAF's Table 5: share of the global model in the re-sampled model (gamma), in 10 rounds.

    python experiments/fedaf/table5.py                  the embedded digits, minutes on 2 cores
    python experiments/fedaf/table5.py --preset cpu     Fashion-MNIST at .02, width 16, 4 rounds
    python experiments/fedaf/table5.py --preset short   the digits, MLP, five seeds; minutes
    python experiments/fedaf/table5.py --preset paper   CIFAR-10: a GPU's work
"""

TABLE6 = EXPERIMENT(
    name="fedaf-table6",
    results_folder="fedaf",
    item="table6",
    title="FedAF, Table 6: best test accuracy of ResNet-18.",
    presets={
        "quick": add_control_rows(
            Preset(
                datasets=("digits",),
                models=("resnet18",),
                alphas=(0.1,),
                seeds=(0,),
                rows=("fedavg", "fedaf"),
                optional_rows=("fedprox", "fedbn", "moon", "feddyn", "fedgen", "feddm"),
                settings={"num_clients": 5, "local_epochs": 5, "rounds": 4},
                model_settings={"resnet18": {"stem": "cifar", "width": 8}},
                method_settings=condensing_method_settings(
                    batch_size=64, options={"ipc": 10, "steps": 25, "server_epochs": 50}
                ),
                note="A client condenses a class of the digits in 25 steps instead of the paper's "
                "1,000. With equally many random real images FedAF is below FedAvg, too: clients "
                "send too few images, however they are matched.",
            ),
            "table6",
        ),
        "paper": add_control_rows(replace(CIFAR10, models=("resnet18",)), "table6"),
    },
)
table6 = make_table_program(TABLE6)
"""FedAF's Table 6: ResNet-18 on CIFAR-10.

    python experiments/fedaf/table6.py                  the embedded digits, minutes on 2 cores
    python experiments/fedaf/table6.py --preset paper   CIFAR-10: a GPU's work

The paper's parameter count fits the stem for large images (7x7, stride 2, max pool), which leaves
8x8 of CIFAR-10's 32x32 pixels. It would leave 2x2 of the digits' 8x8 pixels. Therefore preset quick
has the stem for small images. It has an eighth of the filters, a single alpha and two methods,
since each row compiles a program of 18 layers.
"""
