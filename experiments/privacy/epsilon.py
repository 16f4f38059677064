"""Accuracy against epsilon of FedAvg, FedAdam and FSL with client-level differential privacy."""

import sys

from fedjax_het.papers.privacy.epsilon import main

if __name__ == "__main__":
    sys.exit(main())
