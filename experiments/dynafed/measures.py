"""Measures of DynaFed's synthetic data beside the accuracy of the federation."""

import sys

from fedjax_het.papers.dynafed.measures import main

if __name__ == "__main__":
    sys.exit(main())
