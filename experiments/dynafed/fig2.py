"""DynaFed's Figure 2: the learning curves of Tables 1 and 2 at the two smallest alphas."""

import sys

from fedjax_het.papers.dynafed.tables import fig2 as main

if __name__ == "__main__":
    sys.exit(main())
