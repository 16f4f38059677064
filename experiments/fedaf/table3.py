"""FedAF's Table 3: how many condensed images per class (IPC)."""

import sys

from fedjax_het.papers.fedaf.tables import table3 as main

if __name__ == "__main__":
    sys.exit(main())
