"""FedAMP's Table 2: personalised methods where every client has two classes (pathological).

python experiments/fedamp/table2.py                  the embedded digits, a minute on 2 cores
python experiments/fedamp/table2.py --preset short   Fashion-MNIST, MLP, 25 clients: ten minutes
python experiments/fedamp/table2.py --preset cpu     both MNISTs, MLP, 100 clients: an hour
python experiments/fedamp/table2.py --preset paper   the four data sets: a GPU's work

The settings, rows and score are those of `table1.py`.
"""

from dataclasses import replace

from fedjax_het.papers.fedamp.table1 import TABLE1
from fedjax_het.papers.table import make_table_program

TABLE2 = replace(
    TABLE1,
    name="fedamp-table2",
    item="table2",
    title="FedAMP, Table 2: best mean test accuracy of clients, two classes each (pathological).",
    settings={"partition": "pathological"},
)

main = make_table_program(TABLE2)
