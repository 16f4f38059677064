"""FedAMP's Table 3: personalised methods where clients come in groups (practical non-IID data)."""

import sys

from fedjax_het.papers.fedamp.table3 import main

if __name__ == "__main__":
    sys.exit(main())
