"""FedAMP's Table 1: personalized methods on clients with IID data."""

import sys

from fedjax_het.papers.fedamp.tables import table1 as main

if __name__ == "__main__":
    sys.exit(main())
