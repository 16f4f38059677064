"""HeurFedAMP by its self weight, and FedAMP with clients that drop out."""

import sys

from fedjax_het.papers.fedamp.robustness import main

if __name__ == "__main__":
    sys.exit(main())
