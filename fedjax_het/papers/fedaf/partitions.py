"""The paper's partitions, of label counts alone, for Table 7 and Figures 6 to 8.

Their three data sets are balanced: 6,000 training images a class in Fashion-MNIST, 5,000 in
CIFAR-10, 500 in CIFAR-100. So balanced labels stand for theirs, and nothing is downloaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_het.analysis import plot_partition
from fedjax_het.data import Partition, make_partition
from fedjax_het.papers.programs import ProgramMain, make_config_program
from fedjax_het.utils.config import NonNegativeInt
from fedjax_het.utils.errors import require_name
from fedjax_het.utils.io import make_output_directory

NUM_CLIENTS = 10
ALPHAS = (0.02, 0.05, 0.1)
# Of the other tables and figures; nothing here is worth making quicker.
PRESETS = ("quick", "paper")


class DatasetShape(NamedTuple):
    """What of a data set decides its partitions and bytes."""

    num_classes: int
    images_per_class: int
    image_shape: tuple[int, int, int]


DATASET_SHAPES = {
    "fashion_mnist": DatasetShape(10, 6000, (28, 28, 1)),
    "cifar10": DatasetShape(10, 5000, (32, 32, 3)),
    "cifar100": DatasetShape(100, 500, (32, 32, 3)),
}


def make_balanced_labels(dataset: str) -> np.ndarray:
    shape = get_dataset_shape(dataset)
    return np.repeat(np.arange(shape.num_classes), shape.images_per_class)


def get_dataset_shape(dataset: str) -> DatasetShape:
    """Raises ConfigError for a data set that the paper does not split."""
    require_name("dataset", dataset, DATASET_SHAPES)
    return DATASET_SHAPES[dataset]


def make_paper_partition(dataset: str, alpha: float, seed: int) -> Partition:
    return make_partition(
        "dirichlet_capped",
        make_balanced_labels(dataset),
        get_dataset_shape(dataset).num_classes,
        num_clients=NUM_CLIENTS,
        alpha=alpha,
        seed=seed,
    )


@dataclass
class Arguments:
    """Flags of the programs of the partitions."""

    preset: str = "paper"
    """Size of the figures: quick or paper, which are equal here (seconds, without data)."""
    seed: NonNegativeInt = 0
    """Seed of the partitions."""
    output_dir: str = "results/fedaf-partitions"
    """Folder of the figures."""
    list: bool = False
    """Print the files; draw nothing."""


def make_partition_program(figure: str, dataset: str) -> ProgramMain:
    """Return `main` of a figure, which draws the partitions of a data set at the three alphas."""

    def draw(arguments: Arguments) -> int:
        require_name("preset", arguments.preset, PRESETS)
        directory = Path(arguments.output_dir)
        if not arguments.list:
            make_output_directory(directory)
        for alpha in ALPHAS:
            path = directory / f"{figure}_alpha{alpha:g}.png"
            if not arguments.list:
                partition = make_paper_partition(dataset, alpha, arguments.seed)
                plot_partition(
                    partition,
                    make_balanced_labels(dataset),
                    get_dataset_shape(dataset).num_classes,
                    path,
                    title=f"{dataset}, alpha = {alpha:g}, seed {arguments.seed}",
                )
            print(path)
        return 0

    description = f"FedAF, {figure}: who holds what of {dataset} at alpha 0.02, 0.05 and 0.1."
    return make_config_program(Arguments, draw, description)
