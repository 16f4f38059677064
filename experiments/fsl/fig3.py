"""FSL's Figure 3: training examples of EMNIST beside the server's drawn glyphs."""

import sys

from fedjax_het.papers.fsl.server_examples import fig3 as main

if __name__ == "__main__":
    sys.exit(main())
