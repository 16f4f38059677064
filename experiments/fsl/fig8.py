"""FSL's Figure 8: accuracy and rise time against gamma, of FSL and its non-incremental form."""

import sys

from fedjax_het.papers.fsl.fig8 import main

if __name__ == "__main__":
    sys.exit(main())
