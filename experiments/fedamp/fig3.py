"""FedAMP's Figure 3: the collaboration weights of FedAMP and HeurFedAMP."""

import sys

from fedjax_het.papers.fedamp.fig3 import main

if __name__ == "__main__":
    sys.exit(main())
