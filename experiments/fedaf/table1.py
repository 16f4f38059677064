"""FedAF's Table 1: methods against label skew, on three data sets."""

import sys

from fedjax_het.papers.fedaf.tables import table1 as main

if __name__ == "__main__":
    sys.exit(main())
