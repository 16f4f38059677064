"""FSL's Table I: accuracy and rounds to 50 % with many clients of few labels, on CIFAR-10."""

import sys

from fedjax_het.papers.fsl.table1 import main

if __name__ == "__main__":
    sys.exit(main())
