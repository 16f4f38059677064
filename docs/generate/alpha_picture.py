"""Draw the picture of the first page, accuracy against alpha, for a light and for a dark page.

    python docs/generate/alpha_picture.py   # draws docs/images again from alpha.csv, in seconds
    python docs/generate/alpha_picture.py --run   # makes the runs and alpha.csv first, in minutes

The runs have Fashion-MNIST, 100 clients of which 10 train in a round, and three seeds.
"""

import argparse
from pathlib import Path

import pandas as pd
from dark_pictures import make_dark_variant

from fedjax_het import grid, load_results, sweep
from fedjax_het.analysis import plot_metric_vs_alpha
from fedjax_het.analysis.figures.style import write_figure

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "results" / "alpha"
TABLE = Path(__file__).with_name("alpha.csv")  # a row for each run
COLUMNS = (
    *("protocol", "dataset", "model", "algorithm", "alpha", "seed", "rounds"),
    *("settings", "finished", "diverged", "final_accuracy"),
)
IMAGES = ROOT / "docs" / "images"
METHODS = ("fedavg", "fedadam", "feddyn", "scaffold")
SETTINGS = {
    "protocol": "standard",
    "dataset": "fashion_mnist",
    "model": "mlp",
    "partition": "dirichlet",
    "num_clients": 100,
    "participation": 0.1,
    "local_epochs": 2,
    "local_optimizer": "sgd",
    "learning_rate": 0.05,
    "rounds": 50,
}


def make_runs() -> None:
    """Make the runs that are missing, and write their table."""
    specs = grid(algorithm=METHODS, alpha=[0.05, 0.1, 0.3, 1.0], seed=range(3), **SETTINGS)
    sweep(specs, RUNS)
    load_results(RUNS)[list(COLUMNS)].sort_values(["algorithm", "alpha", "seed"]).to_csv(
        TABLE, index=False, float_format="%.5g"
    )


def draw_pictures() -> None:
    """Draw the picture for a light and for a dark page."""
    figure = plot_metric_vs_alpha(pd.read_csv(TABLE), by=["algorithm"])
    figure.set_size_inches(5, 4.2)  # readable on a phone
    light = write_figure(IMAGES / "alpha-light.png", figure, dpi=130)
    (IMAGES / "alpha-dark.png").write_bytes(make_dark_variant(light.read_bytes()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", action="store_true", help="make missing runs first")
    if parser.parse_args().run:
        make_runs()
    draw_pictures()
