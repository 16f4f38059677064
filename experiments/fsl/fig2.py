"""FSL's Figure 2: accuracy and rise time against gamma, by local learning rate and server data."""

import sys

from fedjax_het.papers.fsl.figures import fig2 as main

if __name__ == "__main__":
    sys.exit(main())
