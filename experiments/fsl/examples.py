"""The server's examples beside those that clients learn from, for Figures 3 and 4."""

from dataclasses import dataclass
from pathlib import Path

from fedjax_het.data import (
    load_dataset,
    make_partition,
    plot_server_examples,
    server_examples,
    server_pool,
)
from fedjax_het.errors import exit_status, require_name
from fedjax_het.files import make_output_directory
from fedjax_het.report.write import write_figure


@dataclass(frozen=True)
class Source:
    """A data set, and where the server's examples are from."""

    dataset: str
    source: str
    options: dict


@dataclass
class Arguments:
    """The command line of Figures 3 and 4."""

    preset: str = "quick"
    """Which of the figure's presets: quick or paper."""
    seed: int = 0
    """Of what the server draws from clients."""
    output_dir: str | None = None
    """Folder of the figure (default: results/fsl-PRESET)."""
    list: bool = False
    """Print the file; draw nothing."""


def main(figure: str, presets: dict[str, Source], argv=None) -> int:
    """Draw `<figure>.png`, and say what the server has."""
    import tyro

    about = f"FSL, {figure}: examples of clients' data and of the server's."
    arguments = tyro.cli(Arguments, args=argv, description=about)

    def run() -> int:
        require_name("preset", arguments.preset, presets)
        made = presets[arguments.preset]
        directory = Path(arguments.output_dir or f"results/fsl-{arguments.preset}")
        path = directory / f"{figure}.png"
        if not arguments.list:
            make_output_directory(directory)
            dataset = load_dataset(made.dataset, normalisation="fsl")
            split = make_partition(
                "iid", dataset.train_labels, dataset.num_classes, num_clients=10, seed=0
            )
            pool = server_pool(made.source, dataset, made.options)
            server = server_examples(
                made.source, dataset, split, arguments.seed, made.options, pool
            )
            print(server.summary(dataset, split, pool))
            picture = plot_server_examples(dataset, *server.examples(dataset, pool))
            write_figure(path, picture)
        print(path)
        return 0

    return exit_status(run, name="error", stopped="stopped")
