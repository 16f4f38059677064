"""FSL's Figure 11: the learning curves of Figure 5 on EMNIST, from the same runs."""

import sys

from fedjax_het.papers.fsl.figures import fig11 as main

if __name__ == "__main__":
    sys.exit(main())
