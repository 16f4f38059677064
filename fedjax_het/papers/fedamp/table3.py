"""FedAMP's Table 3: personalised methods where clients come in groups (practical non-IID data).

python experiments/fedamp/table3.py                  the embedded digits, a minute on 2 cores
python experiments/fedamp/table3.py --preset short   both MNISTs, MLP, 25 clients: half an hour
python experiments/fedamp/table3.py --preset cpu     both MNISTs, MLP, 100 clients: an hour
python experiments/fedamp/table3.py --preset paper   the four data sets: a GPU's work

A group's dominating classes make up 80 % of its clients' data. EMNIST's groups and sizes are the
paper's; those of the others are declared in `fedjax_het.data.grouped_partition`. The settings, rows and score
are those of `table1.py`; `fig2.py` and `fig3.py` are drawn from the same runs.
"""

from dataclasses import replace

from fedjax_het.papers.fedamp.table1 import TABLE1
from fedjax_het.papers.table import make_table_program

QUICK, SHORT = TABLE1.presets["quick"], TABLE1.presets["short"]
# The sizes of groups 1000, 700, 400, 1000, 700 at 9 %: the digits allow no more.
SIZES = {"partition_options": {"group_sizes": [90, 63, 36, 90, 63]}}
TABLE3 = replace(
    TABLE1,
    name="fedamp-table3",
    item="table3",
    title="FedAMP, Table 3: best mean test accuracy of clients, in groups (practical non-IID).",
    settings={"partition": "grouped"},
    presets={
        **TABLE1.presets,
        "quick": replace(QUICK, settings={**QUICK.settings, **SIZES}),
        "short": replace(SHORT, datasets=("fashion_mnist", "mnist")),
    },
)

main = make_table_program(TABLE3)
