"""PFLlib's leaderboard on Fashion-MNIST, with fine-tuned FedAvg, which it leaves out."""

import sys

from fedjax_het.papers.pfllib.table import main

if __name__ == "__main__":
    sys.exit(main())
