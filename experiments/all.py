"""Every table and figure of every paper, one after the other, and one report of them."""

import sys

from fedjax_het.papers.all import main

if __name__ == "__main__":
    sys.exit(main())
