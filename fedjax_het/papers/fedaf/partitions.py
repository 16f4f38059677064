"""FedAF's Figures 6 to 8: partitions as bubbles, from label counts alone.

The three data sets are balanced: 6,000 training images a class in Fashion-MNIST, 5,000 in CIFAR-10,
500 in CIFAR-100. Balanced labels stand for theirs, and nothing is downloaded. Table 7 counts
uploads of the same partitions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.analysis import plot_partition
from fedjax_het.analysis.figures.style import FigureFormat, write_figure
from fedjax_het.data import Partition, make_partition
from fedjax_het.papers.programs import ProgramMain, make_config_program
from fedjax_het.utils.config import NonNegativeInt
from fedjax_het.utils.errors import require_name
from fedjax_het.utils.io import make_output_directory

NUM_CLIENTS = 10
ALPHAS = (0.02, 0.05, 0.1)
PRESETS = ("quick", "paper")  # both are equal, since a partition takes a second


class DatasetShape(NamedTuple):
    """Properties of a data set that determine its partitions and bytes."""

    num_classes: int
    images_per_class: int
    image_shape: tuple[int, int, int]


DATASET_SHAPES = {
    "fashion_mnist": DatasetShape(10, 6000, (28, 28, 1)),
    "cifar10": DatasetShape(10, 5000, (32, 32, 3)),
    "cifar100": DatasetShape(100, 500, (32, 32, 3)),
}


def make_balanced_labels(dataset: str) -> np.ndarray:
    """Return the sorted labels of a balanced data set, int `[N]`.

    Raises:
      ConfigError: if the paper does not split the data set.
    """
    shape = get_dataset_shape(dataset)
    return np.repeat(np.arange(shape.num_classes), shape.images_per_class)


def get_dataset_shape(dataset: str) -> DatasetShape:
    """Return the shape of a data set.

    Raises:
      ConfigError: if the paper does not split the data set.
    """
    require_name("dataset", dataset, DATASET_SHAPES)
    return DATASET_SHAPES[dataset]


def make_paper_partition(dataset: str, alpha: float, seed: int) -> Partition:
    """Draw a partition of the paper.

    Args:
      dataset: name of the data set.
      alpha: Dirichlet concentration.
      seed: seed of the partition.

    Returns:
      The partition of balanced labels among ten clients.
    """
    labels, num_classes = make_balanced_labels(dataset), get_dataset_shape(dataset).num_classes
    options: dict[str, Any] = {"num_clients": NUM_CLIENTS, "alpha": alpha, "seed": seed}
    return make_partition("dirichlet_capped", labels, num_classes, **options)


@dataclass
class Arguments:
    """Flags of the programs of the partitions."""

    preset: str = "paper"
    """Size of the figures: quick or paper, which are equal here (seconds, without data)."""
    seed: NonNegativeInt = 0
    """Seed of the partitions."""
    output_dir: Path = Path("results/fedaf-partitions")
    """Folder of the figures."""
    list: bool = False
    """Print the files; draw nothing."""
    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""


def make_partition_program(figure: str, dataset: str) -> ProgramMain:
    """Make the program of a figure, which draws the partitions of a data set at the three alphas.

    Args:
      figure: name of the figure.
      dataset: name of the data set.

    Returns:
      The program.
    """

    def draw(arguments: Arguments) -> int:
        require_name("preset", arguments.preset, PRESETS)
        directory = Path(arguments.output_dir)
        if not arguments.list:
            make_output_directory(directory)
        for alpha in ALPHAS:
            path = directory / f"{figure}_alpha{alpha:g}.png"
            if not arguments.list:
                picture = plot_partition(
                    make_paper_partition(dataset, alpha, arguments.seed),
                    make_balanced_labels(dataset),
                    get_dataset_shape(dataset).num_classes,
                    title=f"{dataset}, alpha = {alpha:g}, seed {arguments.seed}",
                )
                write_figure(path, picture, formats=arguments.pictures)
            print(path)
        return 0

    description = f"FedAF, {figure}: label counts of each client, {dataset} at alpha 0.02, 0.05 "
    "and 0.1."
    return make_config_program(Arguments, draw, description)


fig6 = make_partition_program("fig6", "cifar10")
"""FedAF's Figure 6: label counts of each client for CIFAR-10, as bubbles.

    python experiments/fedaf/fig6.py    seconds; label counts are enough, so no data set is needed
"""

fig7 = make_partition_program("fig7", "fashion_mnist")
"""FedAF's Figure 7: label counts of each client for Fashion-MNIST, as bubbles.

    python experiments/fedaf/fig7.py    seconds; label counts are enough, so no data set is needed
"""

fig8 = make_partition_program("fig8", "cifar100")
"""FedAF's Figure 8: label counts of each client for CIFAR-100, as bubbles.

    python experiments/fedaf/fig8.py    seconds; label counts are enough, so no data set is needed
"""
