"""FSL's Figure 4: training examples of CIFAR-10 beside the server's of STL-10.

python experiments/fsl/fig4.py                  the embedded digits, seconds: a few clients' data
python experiments/fsl/fig4.py --preset cpu     CIFAR-10 and a few clients' data
python experiments/fsl/fig4.py --preset paper   CIFAR-10 and STL-10
"""

from pathlib import Path
from runpy import run_path

EXAMPLES = run_path(str(Path(__file__).with_name("examples.py")))
Source = EXAMPLES["Source"]
PRESETS = {
    "quick": Source("digits", "clients", {"clients": 5, "per_client": 10}),
    "cpu": Source("cifar10", "clients", {"clients": 10, "per_client": 50}),
    "paper": Source("cifar10", "stl10", {"per_class": 56}),
}


def main(argv=None) -> int:
    return EXAMPLES["main"]("fig4", PRESETS, argv)


if __name__ == "__main__":
    raise SystemExit(main())
