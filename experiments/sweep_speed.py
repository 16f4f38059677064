"""Wall-clock of a sweep: one `fedjax-het sweep` beside one process per run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.benchmarks.sweep import main

if __name__ == "__main__":
    sys.exit(main())
