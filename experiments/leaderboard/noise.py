"""Leaderboard under label noise: 40 % of the training labels are replaced."""

import sys

from fedjax_het.papers.leaderboard.tables import noise as main

if __name__ == "__main__":
    sys.exit(main())
