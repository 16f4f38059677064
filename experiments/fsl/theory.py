"""FSL's theorems on a strongly convex problem: rates, drifts, Eq. 10, and the weight gamma."""

import sys

from fedjax_het.papers.fsl.theory import main

if __name__ == "__main__":
    sys.exit(main())
