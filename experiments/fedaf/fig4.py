"""FedAF's Figure 4: the learning curves of Table 2, from the same runs."""

import sys

from fedjax_het.papers.fedaf.tables import fig4 as main

if __name__ == "__main__":
    sys.exit(main())
