"""FedAF's Table 2: feature skew, one client for each domain of DomainNet."""

import sys

from fedjax_het.papers.fedaf.table2 import main

if __name__ == "__main__":
    sys.exit(main())
