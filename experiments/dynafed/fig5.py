"""DynaFed's Figure 5: how long its trajectory is, and how many synthetic samples it has."""

import sys

from fedjax_het.papers.dynafed.figures import fig5 as main

if __name__ == "__main__":
    sys.exit(main())
