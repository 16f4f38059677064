"""FSL's Figure 6: Figure 1 without pretraining."""

import sys

from fedjax_het.papers.fsl.fig6 import main

if __name__ == "__main__":
    sys.exit(main())
