"""DynaFed's Table 4: rounds to a target accuracy."""

import sys

from fedjax_het.papers.dynafed.table4 import main

if __name__ == "__main__":
    sys.exit(main())
