"""FedAF's Figure 4: the learning curves of Table 2, from the same runs."""

import sys

from fedjax_het.papers.fedaf.fig4 import main

if __name__ == "__main__":
    sys.exit(main())
