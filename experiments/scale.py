"""Cost of a round and memory with 100, 1,000 and 10,000 clients, all sampled."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.benchmarks.scaling import main

if __name__ == "__main__":
    sys.exit(main())
