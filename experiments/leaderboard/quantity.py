"""Leaderboard under quantity skew: sizes of the clients from Dirichlet 0.3."""

import sys

from fedjax_het.papers.leaderboard.tables import quantity as main

if __name__ == "__main__":
    sys.exit(main())
