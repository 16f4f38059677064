"""FSL's Figure 9: distance of the server's and clients' gradients from the gradient of all data."""

import sys

from fedjax_het.papers.fsl.fig9 import main

if __name__ == "__main__":
    sys.exit(main())
