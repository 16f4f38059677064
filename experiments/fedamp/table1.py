"""FedAMP's Table 1: personalised methods where clients' data are alike (IID)."""

import sys

from fedjax_het.papers.fedamp.table1 import main

if __name__ == "__main__":
    sys.exit(main())
