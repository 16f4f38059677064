"""Speed of condensation: this package beside a plain PyTorch loop of the same loss."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.benchmarks.condensation import main

if __name__ == "__main__":
    sys.exit(main())
