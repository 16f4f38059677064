"""DynaFed's Assumption 3: distance of the gradients on synthetic data and on all clients' data."""

import sys

from fedjax_het.papers.dynafed.theory import main

if __name__ == "__main__":
    sys.exit(main())
