"""FedAF's Table 4: without its condensation across clients, without its soft labels, without both."""

import sys

from fedjax_het.papers.fedaf.tables import table4 as main

if __name__ == "__main__":
    sys.exit(main())
