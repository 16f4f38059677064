"""FSL's Figure 3: training examples of EMNIST beside the server's drawn glyphs."""

import sys

from fedjax_het.papers.fsl.fig3 import main

if __name__ == "__main__":
    sys.exit(main())
