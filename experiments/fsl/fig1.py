"""FSL's Figure 1: accuracy by labels per client, of FL, data sharing and FSL at several gamma."""

import sys

from fedjax_het.papers.fsl.figures import fig1 as main

if __name__ == "__main__":
    sys.exit(main())
