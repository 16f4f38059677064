"""The server's examples beside those that clients learn from, for Figures 3 and 4."""

from dataclasses import dataclass
from pathlib import Path

from fedjax_het.common.errors import require_name
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.pictures import write_figure
from fedjax_het.common.records import Whole
from fedjax_het.data import (
    load_dataset,
    make_partition,
    plot_server_examples,
    server_examples,
    server_pool,
)
from fedjax_het.report.programs import Program, function_program

# Sizes, in points, at which glyphs fill the images as its own do; of other data sets the paper's.
GLYPH_SIZES = {"digits": (200, 220, 240)}


@dataclass(frozen=True)
class Source:
    """A data set, and where the server's examples are from."""

    dataset: str
    source: str
    options: dict


def examples_program(figure: str, presets: dict[str, Source]) -> Program:
    """`main` of a figure: draw `<figure>.png`, and print what the server has."""

    def draw(
        preset: str = "quick", seed: Whole = 0, output_dir: str | None = None, list: bool = False
    ) -> int:
        """Draw the figure.

        Args:
            preset: Which of the figure's presets: quick, cpu or paper.
            seed: Of what the server draws from clients.
            output_dir: Folder of the figure (default: results/fsl-PRESET).
            list: Print the file; draw nothing.
        """
        require_name("preset", preset, presets)
        made = presets[preset]
        directory = Path(output_dir or f"results/fsl-{preset}")
        path = directory / f"{figure}.png"
        if not list:
            make_output_directory(directory)
            dataset = load_dataset(made.dataset, normalisation="fsl")
            split = make_partition(
                "iid", dataset.train_labels, dataset.num_classes, num_clients=10, seed=0
            )
            pool = server_pool(made.source, dataset, made.options)
            server = server_examples(made.source, dataset, split, seed, made.options, pool)
            print(server.summary(dataset, split, pool))
            picture = plot_server_examples(dataset, *server.examples(dataset, pool))
            write_figure(path, picture)
        print(path)
        return 0

    about = f"FSL, {figure}: examples of clients' data and of the server's."
    return function_program(draw, about)
