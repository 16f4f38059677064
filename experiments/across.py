"""Comparison across papers: every method of the package under one protocol, against its cost."""

import sys

from fedjax_het.papers.across import main

if __name__ == "__main__":
    sys.exit(main())
