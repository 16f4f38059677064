"""FSL's Figure 8: accuracy and rise time against gamma, of FSL and its non-incremental form."""

import sys

from fedjax_het.papers.fsl.figures import fig8 as main

if __name__ == "__main__":
    sys.exit(main())
