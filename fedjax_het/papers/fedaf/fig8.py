"""FedAF's Figure 8: who holds what of CIFAR-100, as bubbles.

python experiments/fedaf/fig8.py    seconds; label counts are enough, so no data set is needed
"""

from fedjax_het.papers.fedaf.partitions import make_partition_program

main = make_partition_program("fig8", "cifar100")
