"""FedAF's Table 7: upload of a client in a round, computed from the partitions alone."""

import sys

from fedjax_het.papers.fedaf.table7 import main

if __name__ == "__main__":
    sys.exit(main())
