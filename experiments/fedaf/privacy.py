"""Accuracy against epsilon: FedDM and FedAF with differential privacy for every example."""

import sys

from fedjax_het.papers.fedaf.privacy import main

if __name__ == "__main__":
    sys.exit(main())
