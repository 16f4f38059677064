"""Known effects of system heterogeneity, each as a paired comparison of two rows."""

import sys

from fedjax_het.papers.heterogeneity.systems import main

if __name__ == "__main__":
    sys.exit(main())
