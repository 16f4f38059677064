"""The README's picture, of runs that are committed: FSL's Figure 1 on Fashion-MNIST.

python docs/generate/front_picture.py   writes docs/images/front.png again, in seconds
"""

from pathlib import Path

from fedjax_het import load_curves, load_results
from fedjax_het.report import plot_learning_curves

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "experiments" / "fsl" / "results" / "fig1-cpu"
METHODS = ("fedavg", "data_sharing", "fsl")
PICTURE = ROOT / "docs" / "images" / "front.png"


def main() -> None:
    """Accuracy by labels a client: FedAvg, data sharing, and FSL at its own weight of 1."""
    results, curves = load_results(RUNS), load_curves(RUNS)
    shown = (results["dataset"] == "fashion_mnist") & (results["hp.gamma"].fillna(1) == 1)
    shown &= results["algorithm"].isin(METHODS) & (results["rounds"] == 200)
    figure = plot_learning_curves(
        results[shown], curves, by=["classes", "algorithm"], panels=["classes"]
    )
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
