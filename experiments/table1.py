"""DynaFed's Table 1: methods against heterogeneity, on three data sets of ten classes."""

import sys

from fedjax_het.papers.dynafed.tables import table1 as main

if __name__ == "__main__":
    sys.exit(main())
