"""DynaFed's Table 3: longer local training in fewer rounds."""

import sys

from fedjax_het.papers.dynafed.tables import table3 as main

if __name__ == "__main__":
    sys.exit(main())
