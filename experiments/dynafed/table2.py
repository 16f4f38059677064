"""DynaFed's Table 2: a hundred classes."""

import sys

from fedjax_het.papers.dynafed.tables import table2 as main

if __name__ == "__main__":
    sys.exit(main())
