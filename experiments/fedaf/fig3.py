"""FedAF's Figure 3: the learning curves of Table 1, from the same runs."""

import sys

from fedjax_het.papers.fedaf.tables import fig3 as main

if __name__ == "__main__":
    sys.exit(main())
