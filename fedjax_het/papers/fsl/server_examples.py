"""The server's examples beside those that clients learn from, for Figures 3 and 4."""

from dataclasses import dataclass
from pathlib import Path

from fedjax_het.analysis import plot_server_examples
from fedjax_het.analysis.figures.output import write_figure
from fedjax_het.data import (
    load_dataset,
    make_partition,
    make_server_data,
    make_server_pool,
)
from fedjax_het.papers.programs import ProgramMain, make_config_program
from fedjax_het.utils.config import NonNegativeInt
from fedjax_het.utils.errors import require_name
from fedjax_het.utils.io import make_output_directory

# Sizes, in points, at which glyphs fill the images as its own do; of other data sets the paper's.
GLYPH_SIZES = {"digits": (200, 220, 240)}


@dataclass(frozen=True)
class ServerExamplesPreset:
    """A data set, and where the server's examples are from."""

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
    output_dir: str | None = None
    """Folder of the figure (default: results/fsl-PRESET)."""
    list: bool = False
    """Print the file; draw nothing."""


def make_examples_program(figure: str, presets: dict[str, ServerExamplesPreset]) -> ProgramMain:
    """Return `main` of a figure, which draws `<figure>.png` and prints the server's examples."""

    def draw(arguments: Arguments) -> int:
        require_name("preset", arguments.preset, presets)
        server_preset = presets[arguments.preset]
        directory = Path(arguments.output_dir or f"results/fsl-{arguments.preset}")
        path = directory / f"{figure}.png"
        if not arguments.list:
            make_output_directory(directory)
            dataset = load_dataset(server_preset.dataset, normalisation="fsl")
            partition = make_partition(
                "iid", dataset.train_labels, dataset.num_classes, num_clients=10, seed=0
            )
            options = server_preset.options
            pool = make_server_pool(server_preset.source, dataset, options)
            server_data = make_server_data(
                server_preset.source, dataset, partition, arguments.seed, options, pool
            )
            print(server_data.summarize(dataset, partition, pool))
            picture = plot_server_examples(dataset, *server_data.get_examples(dataset, pool))
            write_figure(path, picture)
        print(path)
        return 0

    description = f"FSL, {figure}: examples of clients' data and of the server's."
    return make_config_program(Arguments, draw, description)
