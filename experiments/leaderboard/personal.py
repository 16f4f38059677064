"""Leaderboard of personalized methods: Dirichlet 0.1, tests on the clients' own data."""

import sys

from fedjax_het.papers.leaderboard.tables import personal as main

if __name__ == "__main__":
    sys.exit(main())
