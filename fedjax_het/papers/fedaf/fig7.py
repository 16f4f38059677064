"""FedAF's Figure 7: who holds what of Fashion-MNIST, as bubbles.

python experiments/fedaf/fig7.py    seconds; label counts are enough, so no data set is needed
"""

from fedjax_het.papers.fedaf.partitions import make_partition_program

main = make_partition_program("fig7", "fashion_mnist")
