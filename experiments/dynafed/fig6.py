"""DynaFed's Figure 6: how good the synthetic data are."""

import sys

from fedjax_het.papers.dynafed.fig6 import main

if __name__ == "__main__":
    sys.exit(main())
