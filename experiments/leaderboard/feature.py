"""Leaderboard under feature skew: the images of half of the clients are rotated by 90 degrees."""

import sys

from fedjax_het.papers.leaderboard.tables import feature as main

if __name__ == "__main__":
    sys.exit(main())
