"""FSL's Figure 5: accuracy over local learning rate and labels per client, many clients."""

import sys

from fedjax_het.papers.fsl.fig5 import main

if __name__ == "__main__":
    sys.exit(main())
