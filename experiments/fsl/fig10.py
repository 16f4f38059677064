"""FSL's Figure 10: the learning curves of Figure 5 on CIFAR-10, from the same runs."""

import sys

from fedjax_het.papers.fsl.figures import fig10 as main

if __name__ == "__main__":
    sys.exit(main())
