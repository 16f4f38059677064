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
from fedjax_het.papers.programs import ProgramMain, make_function_program
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


def make_examples_program(figure: str, presets: dict[str, ServerExamplesPreset]) -> ProgramMain:
    """`main` of a figure: draw `<figure>.png`, and print what the server has."""

    def draw(
        preset: str = "quick",
        seed: NonNegativeInt = 0,
        output_dir: str | None = None,
        list: bool = False,
    ) -> int:
        """Draw the figure.

        Args:
            preset: Which of the figure's presets: quick, cpu or paper.
            seed: Of what the server draws from clients.
            output_dir: Folder of the figure (default: results/fsl-PRESET).
            list: Print the file; draw nothing.
        """
        require_name("preset", preset, presets)
        server_preset = presets[preset]
        directory = Path(output_dir or f"results/fsl-{preset}")
        path = directory / f"{figure}.png"
        if not list:
            make_output_directory(directory)
            dataset = load_dataset(server_preset.dataset, normalisation="fsl")
            partition = make_partition(
                "iid", dataset.train_labels, dataset.num_classes, num_clients=10, seed=0
            )
            pool = make_server_pool(server_preset.source, dataset, server_preset.options)
            server_data = make_server_data(
                server_preset.source, dataset, partition, seed, server_preset.options, pool
            )
            print(server_data.summarize(dataset, partition, pool))
            picture = plot_server_examples(dataset, *server_data.get_examples(dataset, pool))
            write_figure(path, picture)
        print(path)
        return 0

    description = f"FSL, {figure}: examples of clients' data and of the server's."
    return make_function_program(draw, description)
