"""FSL's Figure 7: FSL, its non-incremental form and data sharing, by labels and clients a round."""

import sys

from fedjax_het.papers.fsl.figures import fig7 as main

if __name__ == "__main__":
    sys.exit(main())
