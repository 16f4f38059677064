"""FSL's Figure 4: training examples of CIFAR-10 beside the server's of STL-10."""

import sys

from fedjax_het.papers.fsl.server_examples import fig4 as main

if __name__ == "__main__":
    sys.exit(main())
