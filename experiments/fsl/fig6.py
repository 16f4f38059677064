"""FSL's Figure 6: Figure 1 without pretraining."""

import sys

from fedjax_het.papers.fsl.figures import fig6 as main

if __name__ == "__main__":
    sys.exit(main())
