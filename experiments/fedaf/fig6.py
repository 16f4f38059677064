"""FedAF's Figure 6: who holds what of CIFAR-10, as bubbles."""

import sys

from fedjax_het.papers.fedaf.fig6 import main

if __name__ == "__main__":
    sys.exit(main())
