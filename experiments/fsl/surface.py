"""FSL's gain over FedAvg by size and divergence of the server's data, with controls."""

import sys

from fedjax_het.papers.fsl.surface import main

if __name__ == "__main__":
    sys.exit(main())
