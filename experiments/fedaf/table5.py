"""FedAF's Table 5: how much of the global model the re-sampled model keeps (gamma), in 10 rounds."""

import sys

from fedjax_het.papers.fedaf.tables import table5 as main

if __name__ == "__main__":
    sys.exit(main())
