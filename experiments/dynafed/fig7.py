"""DynaFed's Figure 7: the learning curves of Table 6, from the same runs.

python experiments/dynafed/fig7.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/fig7.py --preset paper   CIFAR-10: a GPU's work

Makes the runs of Table 6 that are missing; `--show` draws those that are there.
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from fedjax_het.report.paper_table import main, write_curves

TABLE6 = run_path(str(Path(__file__).with_name("table6.py")))["TABLE6"]
FIG7 = replace(TABLE6, title="DynaFed, Figure 7: learning curves, a fifth of the clients a round.")

if __name__ == "__main__":
    raise SystemExit(main(FIG7, write=write_curves("fig7")))
