"""DynaFed's Figure 7: the learning curves of Table 6, from the same runs."""

import sys

from fedjax_het.papers.dynafed.tables import fig7 as main

if __name__ == "__main__":
    sys.exit(main())
