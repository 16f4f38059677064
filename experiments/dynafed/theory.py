"""DynaFed's Assumption 3: distance of the synthetic data's gradient from that of all clients' data."""

import sys

from fedjax_het.papers.dynafed.theory import main

if __name__ == "__main__":
    sys.exit(main())
