"""Speed of FedAMP: this package beside a plain PyTorch loop of the same rounds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.benchmarks.personalization import main

if __name__ == "__main__":
    sys.exit(main())
