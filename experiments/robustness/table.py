"""Accuracy of robust aggregation and of RoFSL under attacks of malicious clients."""

import sys

from fedjax_het.papers.robustness.table import main

if __name__ == "__main__":
    sys.exit(main())
