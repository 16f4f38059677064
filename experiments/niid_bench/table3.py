"""NIID-Bench's grid: four methods under six skews of MNIST, Fashion-MNIST and CIFAR-10."""

import sys

from fedjax_het.papers.niid_bench.table3 import main

if __name__ == "__main__":
    sys.exit(main())
