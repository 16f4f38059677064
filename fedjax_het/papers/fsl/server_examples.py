"""FSL's Figures 3 and 4: the server's examples beside the clients' training examples."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedjax_het.analysis import plot_server_examples
from fedjax_het.analysis.figures.style import FigureFormat, write_figure
from fedjax_het.data import load_dataset, make_partition, make_server_data, make_server_pool
from fedjax_het.papers.fsl.scenarios import GLYPH_SIZES
from fedjax_het.papers.programs import ProgramMain, make_config_program
from fedjax_het.utils.config import NonNegativeInt
from fedjax_het.utils.errors import require_name
from fedjax_het.utils.io import make_output_directory


class ServerExamplesPreset(NamedTuple):
    """A data set, and the source of the server's examples with its options."""

    dataset: str
    source: str
    options: dict


@dataclass
class Arguments:
    """Flags of the programs of the server's examples."""

    preset: str = "quick"
    """Size of the figure: quick, cpu or paper, as far as the figure has them."""
    seed: NonNegativeInt = 0
    """Seed of the examples that the server draws from clients."""
    output_dir: Path | None = None
    """Folder of the figure (default: results/fsl-PRESET)."""
    list: bool = False
    """Print the file; draw nothing."""
    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""


def make_examples_program(figure: str, presets: dict[str, ServerExamplesPreset]) -> ProgramMain:
    """Make the program of a figure, which draws `<figure>.png` and prints the server's examples.

    Args:
      figure: name of the figure.
      presets: presets by name.

    Returns:
      The program.
    """

    def draw(arguments: Arguments) -> int:
        require_name("preset", arguments.preset, presets)
        name, source, options = presets[arguments.preset]
        directory = Path(arguments.output_dir or f"results/fsl-{arguments.preset}")
        path = directory / f"{figure}.png"
        if not arguments.list:
            make_output_directory(directory)
            dataset = load_dataset(name, normalization="fsl")
            labels, num_classes = dataset.train_labels, dataset.num_classes
            partition = make_partition("iid", labels, num_classes, num_clients=10, seed=0)
            pool = make_server_pool(source, dataset, options)
            server_data = make_server_data(
                source, dataset, partition, arguments.seed, options, pool
            )
            print(server_data.summarize(dataset, partition, pool))
            picture = plot_server_examples(dataset, *server_data.get_examples(dataset, pool))
            write_figure(path, picture, formats=arguments.pictures)
        print(path)
        return 0

    description = f"FSL, {figure}: examples of clients' data and of the server's."
    return make_config_program(Arguments, draw, description)


FIG3_PRESETS = {
    "quick": ServerExamplesPreset("digits", "glyphs", {"sizes": GLYPH_SIZES["digits"]}),
    "paper": ServerExamplesPreset("emnist_45", "glyphs", {}),
}
fig3 = make_examples_program("fig3", FIG3_PRESETS)
"""FSL's Figure 3: training examples of EMNIST beside the server's drawn glyphs.

    python experiments/fsl/fig3.py                  the embedded digits, seconds
    python experiments/fsl/fig3.py --preset paper   EMNIST
"""

FIG4_PRESETS = {
    "quick": ServerExamplesPreset("digits", "clients", {"clients": 5, "per_client": 10}),
    "cpu": ServerExamplesPreset("cifar10", "clients", {"clients": 10, "per_client": 50}),
    "paper": ServerExamplesPreset("cifar10", "stl10", {"per_class": 56}),
}
fig4 = make_examples_program("fig4", FIG4_PRESETS)
"""FSL's Figure 4: training examples of CIFAR-10 beside the server's of STL-10.

    python experiments/fsl/fig4.py                  embedded digits, seconds: a few clients' data
    python experiments/fsl/fig4.py --preset cpu     CIFAR-10 and a few clients' data
    python experiments/fsl/fig4.py --preset paper   CIFAR-10 and STL-10
"""
