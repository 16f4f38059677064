"""FedAF's Figure 3: the learning curves of Table 1, from the same runs."""

import sys

from fedjax_het.papers.fedaf.fig3 import main

if __name__ == "__main__":
    sys.exit(main())
