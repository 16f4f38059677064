"""DynaFed's Table 6: a fifth of the clients in each round."""

import sys

from fedjax_het.papers.dynafed.tables import table6 as main

if __name__ == "__main__":
    sys.exit(main())
