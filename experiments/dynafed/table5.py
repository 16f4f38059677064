"""DynaFed's Table 5: two networks on Fashion-MNIST, 80 clients, 200 rounds."""

import sys

from fedjax_het.papers.dynafed.tables import table5 as main

if __name__ == "__main__":
    sys.exit(main())
