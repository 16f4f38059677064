"""FedAF's Table 4: without condensation across clients, without soft labels, without both."""

import sys

from fedjax_het.papers.fedaf.tables import table4 as main

if __name__ == "__main__":
    sys.exit(main())
