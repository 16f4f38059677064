"""FedAF's Table 1: methods against label skew, on three data sets."""

import sys

from fedjax_het.papers.fedaf.table1 import main

if __name__ == "__main__":
    sys.exit(main())
