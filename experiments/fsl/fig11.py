"""FSL's Figure 11: the learning curves of Figure 5 on EMNIST, from the same runs.

python experiments/fsl/fig11.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig11.py --preset paper   EMNIST: a GPU's work
"""

from pathlib import Path
from runpy import run_path

from fedjax_het.report.paper_table import main, write_drawing

FIG10 = run_path(str(Path(__file__).with_name("fig10.py")))
FIG11 = FIG10["curves_of"]("emnist_45", "fig11")

if __name__ == "__main__":
    by = FIG10["FIG5"]["BY"]
    write = write_drawing("fig11", FIG10["draw"], by=by, measure="window_accuracy")
    raise SystemExit(main(FIG11, write=write))
