"""DynaFed's Figure 5: how long its trajectory is, and how many synthetic samples it has."""

import sys

from fedjax_het.papers.dynafed.fig5 import main

if __name__ == "__main__":
    sys.exit(main())
