"""FedAF's Figure 7: who holds what of Fashion-MNIST, as bubbles."""

import sys

from fedjax_het.papers.fedaf.partitions import fig7 as main

if __name__ == "__main__":
    sys.exit(main())
