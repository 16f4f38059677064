"""FedAF's Figure 9: images of one class by domain, in a network's feature space (t-SNE)."""

import sys

from fedjax_het.papers.fedaf.fig9 import main

if __name__ == "__main__":
    sys.exit(main())
