"""FedAF's Figure 3: the learning curves of Table 1, from the same runs.

python experiments/fedaf/fig3.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/fig3.py --preset paper   a GPU's work

Makes the runs of Table 1 that are missing; `--show` draws those that are there.
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from fedjax_het.report.paper_table import main, write_curves

TABLE1 = run_path(str(Path(__file__).with_name("table1.py")))["TABLE1"]
PAPER = replace(TABLE1.presets["paper"], datasets=("cifar10", "cifar100", "fashion_mnist"))
FIG3 = replace(
    TABLE1,
    title="FedAF, Figure 3: learning curves.",
    presets={**TABLE1.presets, "paper": PAPER},
)

if __name__ == "__main__":
    raise SystemExit(main(FIG3, write=write_curves("fig3")))
