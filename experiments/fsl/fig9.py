"""FSL's Figure 9: how unlike all clients' data the server's, and a client's, are for the gradient."""

import sys

from fedjax_het.papers.fsl.fig9 import main

if __name__ == "__main__":
    sys.exit(main())
