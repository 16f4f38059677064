"""FedAF's Figure 4: the learning curves of Table 2, from the same runs.

python experiments/fedaf/fig4.py                  six domains of the embedded digits, minutes
python experiments/fedaf/fig4.py --preset paper   DomainNet: a GPU's work

Makes the runs of Table 2 that are missing; `--show` draws those that are there.
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from fedjax_het.report.paper_table import main, write_curves

TABLE2 = run_path(str(Path(__file__).with_name("table2.py")))["TABLE2"]
FIG4 = replace(TABLE2, title="FedAF, Figure 4: learning curves by domain.")

if __name__ == "__main__":
    raise SystemExit(main(FIG4, write=write_curves("fig4")))
