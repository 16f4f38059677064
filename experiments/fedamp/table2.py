"""FedAMP's Table 2: personalised methods where every client has two classes (pathological)."""

import sys

from fedjax_het.papers.fedamp.tables import table2 as main

if __name__ == "__main__":
    sys.exit(main())
