"""DynaFed's Figure 3: losses of three clients' data in local training and in fine-tuning."""

import sys

from fedjax_het.papers.dynafed.fig3 import main

if __name__ == "__main__":
    sys.exit(main())
