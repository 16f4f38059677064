"""FedAMP's Figure 2: accuracies of the clients of Table 3 by method, with Wilcoxon's tests."""

import sys

from fedjax_het.papers.fedamp.fig2 import main

if __name__ == "__main__":
    sys.exit(main())
