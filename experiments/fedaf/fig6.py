"""FedAF's Figure 6: who holds what of CIFAR-10, as bubbles."""

import sys

from fedjax_het.papers.fedaf.partitions import fig6 as main

if __name__ == "__main__":
    sys.exit(main())
