"""FedAF's Table 6: ResNet-18 on CIFAR-10."""

import sys

from fedjax_het.papers.fedaf.table6 import main

if __name__ == "__main__":
    sys.exit(main())
