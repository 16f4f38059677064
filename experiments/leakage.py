"""Information that the images of DynaFed, FedDM and FedAF contain about the clients' images."""

import sys

from fedjax_het.papers.leakage import main

if __name__ == "__main__":
    sys.exit(main())
