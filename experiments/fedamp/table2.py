"""FedAMP's Table 2: personalized methods on clients with two classes each (pathological)."""

import sys

from fedjax_het.papers.fedamp.tables import table2 as main

if __name__ == "__main__":
    sys.exit(main())
