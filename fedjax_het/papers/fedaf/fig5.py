"""FedAF's Figure 5: the learning curves of Table 3, and (d) what every IPC gains over FedAvg.

python experiments/fedaf/fig5.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/fig5.py --preset paper   CIFAR-10: a GPU's work

Makes the runs of Table 3 and FedAvg's of Table 1 that are missing, in the folder that they share;
`--show` draws those that are there. `fig5.png` holds panels a to c, `fig5d.png` the gains.
"""

from dataclasses import replace

import pandas as pd

from fedjax_het import analysis
from fedjax_het.analysis.figures.accuracy_gain import plot_accuracy_gain
from fedjax_het.analysis.figures.output import write_figure
from fedjax_het.papers.fedaf.table3 import TABLE3
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableRun, make_table_program

FIG5 = replace(
    TABLE3,
    title="FedAF, Figure 5: learning curves by condensed images per class, and gain over FedAvg.",
    presets={
        name: replace(preset, rows=(*TABLE3.list_rows(name), "fedavg"))
        for name, preset in TABLE3.presets.items()
    },
)


def write_figures(table_run: TableRun) -> list[str]:
    fedavg_values = load_reported_values("fedaf", "table1").query("method == 'fedavg'")
    reported = pd.concat([table_run.reported, fedavg_values])
    table = analysis.compare_with_reported(table_run.cells, table_run.results, reported)
    figures = {
        "fig5.png": analysis.plot_table_curves(
            table_run.cells,
            table_run.results,
            table_run.curves,
            reported,
            display_names=FIG5.row_display_names,
        ),
        "fig5d.png": plot_accuracy_gain(table, baseline="fedavg"),
    }
    for name, figure in figures.items():
        write_figure(table_run.directory / name, figure)
    return list(figures)


main = make_table_program(FIG5, write_figures)

if __name__ == "__main__":
    raise SystemExit(main())
