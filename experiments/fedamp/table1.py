"""FedAMP's Table 1: personalised methods where clients' data are alike (IID)."""

import sys

from fedjax_het.papers.fedamp.tables import table1 as main

if __name__ == "__main__":
    sys.exit(main())
