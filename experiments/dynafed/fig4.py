"""DynaFed's Figure 4: synthetic images of three classes over the course of their synthesis."""

import sys

from fedjax_het.papers.dynafed.fig4 import main

if __name__ == "__main__":
    sys.exit(main())
