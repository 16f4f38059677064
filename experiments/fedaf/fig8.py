"""FedAF's Figure 8: who holds what of CIFAR-100, as bubbles."""

import sys

from fedjax_het.papers.fedaf.partitions import fig8 as main

if __name__ == "__main__":
    sys.exit(main())
