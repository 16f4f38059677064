"""DynaFed's Theorem 1 and Lemma 3 on a strongly convex problem."""

import sys

from fedjax_het.papers.dynafed.convergence import main

if __name__ == "__main__":
    sys.exit(main())
