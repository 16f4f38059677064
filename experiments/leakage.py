"""What DynaFed's, FedDM's and FedAF's images give away of the clients' images."""

import sys

from fedjax_het.papers.leakage import main

if __name__ == "__main__":
    sys.exit(main())
