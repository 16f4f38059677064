"""FedAF's Table 6: ResNet-18 on CIFAR-10."""

import sys

from fedjax_het.papers.fedaf.tables import table6 as main

if __name__ == "__main__":
    sys.exit(main())
