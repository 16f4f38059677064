"""FedAF's Figure 6: who holds what of CIFAR-10, as bubbles.

python experiments/fedaf/fig6.py    seconds; label counts are enough, so no data set is needed
"""

from fedjax_het.papers.fedaf.partitions import make_partition_program

main = make_partition_program("fig6", "cifar10")
