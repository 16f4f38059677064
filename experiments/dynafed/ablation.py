"""The share of each setting of DynaFed's synthesis and fine-tuning in its gain, with controls."""

import sys

from fedjax_het.papers.dynafed.ablation import main

if __name__ == "__main__":
    sys.exit(main())
