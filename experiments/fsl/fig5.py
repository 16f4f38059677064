"""FSL's Figure 5: accuracy over local learning rate and labels per client, many clients."""

import sys

from fedjax_het.papers.fsl.figures import fig5 as main

if __name__ == "__main__":
    sys.exit(main())
