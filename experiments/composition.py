"""DynaFed and FSL on top of other methods, each compared with its control."""

import sys

from fedjax_het.papers.composition import main

if __name__ == "__main__":
    sys.exit(main())
