"""Leaderboard under label skew: Dirichlet 0.1."""

import sys

from fedjax_het.papers.leaderboard.tables import label as main

if __name__ == "__main__":
    sys.exit(main())
