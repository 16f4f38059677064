"""DynaFed's Figure 4: synthetic images of three classes over the course of their synthesis."""

import sys

from fedjax_het.papers.dynafed.figures import fig4 as main

if __name__ == "__main__":
    sys.exit(main())
