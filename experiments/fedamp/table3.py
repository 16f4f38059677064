"""FedAMP's Table 3: personalized methods on groups of clients (practical non-IID data)."""

import sys

from fedjax_het.papers.fedamp.tables import table3 as main

if __name__ == "__main__":
    sys.exit(main())
