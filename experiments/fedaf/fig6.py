"""FedAF's Figure 6: who holds what of CIFAR-10, as bubbles.

python experiments/fedaf/fig6.py    seconds; label counts are enough, so no data set is needed
"""

from pathlib import Path
from runpy import run_path

main = run_path(str(Path(__file__).with_name("partitions.py")))["main"]

if __name__ == "__main__":
    raise SystemExit(main("fig6", "cifar10"))
