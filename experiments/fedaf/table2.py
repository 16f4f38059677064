"""FedAF's Table 2: feature skew, one client for each domain of DomainNet."""

import sys

from fedjax_het.papers.fedaf.tables import table2 as main

if __name__ == "__main__":
    sys.exit(main())
