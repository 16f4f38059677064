"""DynaFed's Figure 6: quality of the synthetic data."""

import sys

from fedjax_het.papers.dynafed.fig6 import main

if __name__ == "__main__":
    sys.exit(main())
