"""Distances of FedAF's collaboration term, and uploads of 8 bits, in accuracy."""

import sys

from fedjax_het.papers.fedaf.ablations import main

if __name__ == "__main__":
    sys.exit(main())
