"""FedAF's Table 5: share of the global model in the re-sampled model (gamma), in 10 rounds."""

import sys

from fedjax_het.papers.fedaf.tables import table5 as main

if __name__ == "__main__":
    sys.exit(main())
