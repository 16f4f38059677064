"""Draw the picture of the first page, accuracy against alpha, for a light and for a dark page.

    python docs/generate/alpha_picture.py   # draws docs/images again from alpha.csv, in seconds
    python docs/generate/alpha_picture.py --run   # makes the runs and alpha.csv first, in minutes

The runs have Fashion-MNIST, 100 clients of which 10 train in a round, and three seeds.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fedjax_het import grid, load_results, sweep
from fedjax_het.analysis import plot_metric_vs_alpha

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "results" / "alpha"
TABLE = Path(__file__).with_name("alpha.csv")  # a row for each run
COLUMNS = (
    *("protocol", "dataset", "model", "algorithm", "alpha", "seed", "rounds"),
    *("settings", "finished", "diverged", "final_accuracy"),
)
IMAGES = ROOT / "docs" / "images"
DARK_INK, DARK_PAPER = "#d0d3dc", "#1e2129"  # text and page of the site's dark scheme
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


def to_dark(figure: "Figure") -> None:
    """Replace the colors of a figure for a dark page: light texts and axes, and no black lines."""
    from matplotlib.colors import to_rgb

    figure.set_facecolor(DARK_PAPER)
    for panel in figure.axes:
        panel.set_facecolor(DARK_PAPER)
        panel.tick_params(colors=DARK_INK)
        panel.spines[:].set_color(DARK_INK)
    for artist in figure.findobj(lambda artist: hasattr(artist, "get_color")):
        red, green, blue = to_rgb(artist.get_color())
        if max(red, green, blue) - min(red, green, blue) < 0.1 and red < 0.6:
            artist.set_color(DARK_INK)


def draw_pictures() -> None:
    """Draw the picture for a light and for a dark page."""
    results = pd.read_csv(TABLE)
    for name in ("light", "dark"):
        figure = plot_metric_vs_alpha(results, by=["algorithm"])
        if name == "dark":
            to_dark(figure)
        figure.savefig(IMAGES / f"alpha-{name}.png", dpi=110, facecolor=figure.get_facecolor())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", action="store_true", help="make missing runs first")
    if parser.parse_args().run:
        make_runs()
    draw_pictures()
