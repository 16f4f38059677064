"""FSL's Figure 11: the learning curves of Figure 5 on EMNIST, from the same runs.

python experiments/fsl/fig11.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig11.py --preset paper   EMNIST: a GPU's work
"""

from experiments.fsl.fig5 import BY
from experiments.fsl.fig10 import curves_of, draw
from fedjax_het.report.paper_table import program, write_drawing

FIG11 = curves_of("emnist_45", "fig11")

main = program(FIG11, write_drawing("fig11", draw, by=BY, measure="window_accuracy"))

if __name__ == "__main__":
    raise SystemExit(main())
