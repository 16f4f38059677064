"""Speed of local training: this package beside other simulators, in one run, with equal work."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.benchmarks.local_training import main

if __name__ == "__main__":
    sys.exit(main())
