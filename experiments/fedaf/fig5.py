"""FedAF's Figure 5: the learning curves of Table 3, and (d) the gain of every IPC over FedAvg."""

import sys

from fedjax_het.papers.fedaf.fig5 import main

if __name__ == "__main__":
    sys.exit(main())
