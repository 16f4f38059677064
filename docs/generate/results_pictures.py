"""Draw pictures of the results from committed runs.

The pictures show FSL's Figure 1 on Fashion-MNIST, every method against its costs, DynaFed's preset
`improved` beside its controls, and DynaFed and FSL over other methods.

    python docs/generate/results_pictures.py   # writes docs/images again, in seconds
"""

import sys
from pathlib import Path

from fedjax_het import load_curves, load_results
from fedjax_het.analysis import plot_learning_curves
from fedjax_het.analysis.figures.style import write_figure
from fedjax_het.papers.table import TableArguments, TableDeclaration, TableRun, make_cells

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "experiments" / "fsl" / "results" / "fig1-cpu"
METHODS = ("fedavg", "data_sharing", "fsl")
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT))


def load_table(declaration: TableDeclaration, folder: str) -> TableRun:
    """Load the preset `cpu` of a table from a folder below `experiments`."""
    cells = make_cells(declaration, TableArguments("cpu"))
    return TableRun.from_directory(declaration, "cpu", cells, ROOT / "experiments" / folder)


def draw_fsl_picture() -> None:
    """Draw accuracy against classes per client: FedAvg, data sharing, and FSL with weight 1."""
    results, curves = load_results(RUNS), load_curves(RUNS)
    shown = (results["dataset"] == "fashion_mnist") & (results["hp.gamma"].fillna(1) == 1)
    shown &= results["algorithm"].isin(METHODS) & (results["rounds"] == 200)
    figure = plot_learning_curves(
        results[shown], curves, by=["classes", "algorithm"], panels=["classes"]
    )
    write_figure(IMAGES / "fsl.png", figure, dpi=110)


def draw_cost_picture() -> None:
    """Draw accuracy of every method on all test images against rounds, bytes and operations."""
    from fedjax_het.papers.across import ACROSS, GLOBAL_METRIC, collect_rows, plot_accuracy_vs_cost

    table_run = load_table(ACROSS, "results/across-cpu")
    figure = plot_accuracy_vs_cost(collect_rows(table_run), GLOBAL_METRIC)
    write_figure(IMAGES / "across.png", figure, dpi=100)


def draw_synthesis_picture() -> None:
    """Draw accuracy against the round: FedAvg, DynaFed's preset `improved`, and its controls."""
    from fedjax_het.papers.dynafed.ablation import ABLATION, plot_main_rows

    table_run = load_table(ABLATION, "dynafed/results/ablation-cpu")
    write_figure(IMAGES / "synthesis.png", plot_main_rows(table_run), dpi=100)


def draw_composition_picture() -> None:
    """Draw the accuracy of DynaFed, FSL and their controls over five methods."""
    from fedjax_het.papers.composition import COMPOSITION, collect_curves, plot_composition

    table_run = load_table(COMPOSITION, "results/composition-cpu")
    write_figure(IMAGES / "composition.png", plot_composition(collect_curves(table_run)), dpi=100)


if __name__ == "__main__":
    draw_composition_picture()
    draw_synthesis_picture()
    draw_fsl_picture()
    draw_cost_picture()
