"""Atlas of heterogeneity: the accuracy that each kind costs each method, at three strengths."""

import sys

from fedjax_het.papers.heterogeneity.atlas import main

if __name__ == "__main__":
    sys.exit(main())
