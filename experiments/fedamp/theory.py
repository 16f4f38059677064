"""FedAMP's Theorems 1 and 2: the objective G(W) and its gradient along runs."""

import sys

from fedjax_het.papers.fedamp.theory import main

if __name__ == "__main__":
    sys.exit(main())
