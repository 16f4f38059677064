"""FedAF's Table 2: feature skew, one client for each domain of DomainNet.

python experiments/fedaf/table2.py                  six domains of the embedded digits, minutes
python experiments/fedaf/table2.py --preset paper   DomainNet's ten classes at 64x64: a GPU's work

The quick preset's domains are made up, see `domains.py`: they show that the table works, and say
nothing about DomainNet. Its learning curves are the paper's Figure 4 (`fig4.py`).

FedBN is scored as in its own paper: a domain's accuracy is that of its client's model, i.e. of the
averaged network with the client's own normalisation layers. All others have one global model. What
the paper leaves open of the baselines is chosen as in `table1.py`.
"""

from typing import Any

from fedjax_het.analysis import parse_row
from fedjax_het.papers.fedaf.domains import DOMAINS, make_digit_domains
from fedjax_het.papers.fedaf.settings import (
    EXPERIMENT,
    QUICK,
    add_control_rows,
    condensing_method_settings,
)
from fedjax_het.papers.table import Preset, make_table_program


def read_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """FedBN tests each client, which is a domain, with its own normalisation layers."""
    method, variant = parse_row(row)
    return method, variant | ({"local_tests": True} if method == "fedbn" else {})


TABLE2 = EXPERIMENT(
    name="fedaf-table2",
    item="table2",
    title="FedAF, Table 2: test accuracy of the global model by domain.",
    note="fedbn: each domain's accuracy is that of its client's own model, the averaged network "
    "with the client's normalisation layers, as that method has no global one.",
    row_parser=read_row,
    settings={"partition": "by_domain", "num_clients": 6, "rounds": 10},
    presets={
        "quick": add_control_rows(
            Preset(
                datasets=("user",),
                models=("convnet",),
                domains=DOMAINS,
                seeds=(0,),
                description="the embedded digits in six made-up domains, no images of DomainNet",
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

main = make_table_program(TABLE2)
