"""DynaFed's Table 3: longer local training in fewer rounds."""

import sys

from fedjax_het.papers.dynafed.table3 import main

if __name__ == "__main__":
    sys.exit(main())
