"""DynaFed's Figures 4 and 5: synthetic images, and the sizes of the trajectory and of the data."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fedjax_het.analysis import plot_learning_curves, plot_metric_vs_setting
from fedjax_het.analysis.figures.run_figures import get_snapshots
from fedjax_het.analysis.figures.style import write_figure
from fedjax_het.analysis.figures.synthetic_images import plot_synthesis
from fedjax_het.data import load_dataset
from fedjax_het.papers.dynafed.settings import EXPERIMENT, FOLDER, PRESETS
from fedjax_het.papers.table import Preset, TableRun, make_figure_writer, make_table_program

NUM_CLASSES = 3  # of Figure 4
FIG4 = EXPERIMENT(
    name="dynafed-fig4",
    results_folder=FOLDER,
    item="fig4",
    title="DynaFed, Figure 4: synthetic images over the iterations of their synthesis.",
    has_reported_values=False,
    presets={
        name: replace(preset, alphas=(0.01,), seeds=(0,), rows=("dynafed",))
        for name, preset in PRESETS.items()
    },
)


def _write_fig4(table_run: TableRun) -> list[str]:
    for _, result in table_run.iterate_results():
        if "snapshots" in result.artifacts:
            class_names = load_dataset(result.spec.dataset).class_names
            snapshots = get_snapshots(result)
            figure = plot_synthesis(snapshots, num_samples=NUM_CLASSES, class_names=class_names)
            write_figure(table_run.directory / "fig4.png", figure, formats=table_run.formats)
            return ["fig4.png"]
    print("There is no run to draw.")
    return []


fig4 = make_table_program(FIG4, _write_fig4)
"""DynaFed's Figure 4: synthetic images of three classes over the course of their synthesis.

    python experiments/dynafed/fig4.py                  the embedded digits, a minute on 2 cores
    python experiments/dynafed/fig4.py --preset cpu     Fashion-MNIST, width 32: as Table 1
    python experiments/dynafed/fig4.py --preset paper   CIFAR-10: a GPU's work

The images are from one run of Table 1, in its folder. The paper does not state alpha; here it is
the smallest.
"""

# The caption has 15 twice, the text 25.
LENGTHS = {"quick": (10, 20), "cpu": (10, 15, 20, 25), "paper": (10, 15, 20, 25)}
# The paper names 150 alone.
SAMPLES = {"quick": (50, 150), "cpu": (50, 150, 300), "paper": (50, 100, 150, 200, 300)}


def _make_presets(list_rows: Callable[[str], Iterable[str]], **changes: Any) -> dict[str, Preset]:
    preset_changes: dict[str, dict[str, Any]] = {
        "quick": {"alphas": (0.01, 0.04), "seeds": (0,)},
        "cpu": {"alphas": (0.01,), "models": ("mlp",), "model_settings": {}, "description": ""},
        "paper": {},
    }
    return {
        name: replace(preset, rows=tuple(list_rows(name)), **{**preset_changes[name], **changes})
        for name, preset in PRESETS.items()
    }


def _list_length_rows(name: str) -> tuple[str, ...]:
    lengths = (f"dynafed(trajectory_rounds={length})" for length in LENGTHS[name])
    return ("fedavg", "fedgen", *lengths)


FIG5_LENGTH = EXPERIMENT(
    name="dynafed-fig5",
    results_folder="dynafed-fig5",
    item="fig5",
    title="DynaFed, Figure 5, left: test accuracy by the length of the trajectory.",
    has_reported_values=False,
    presets=_make_presets(_list_length_rows, alphas=(0.01,)),
)
FIG5_SAMPLES = replace(
    FIG5_LENGTH,
    title="DynaFed, Figure 5, right: test accuracy by the number of synthetic samples.",
    presets=_make_presets(lambda name: (f"dynafed(num_samples={n})" for n in SAMPLES[name])),
)
_LENGTH_GROUPING = ("dataset", "alpha", "algorithm", "options.trajectory_rounds")
_SAMPLES_GROUPING = ("dataset", "alpha", "options.num_samples")


def _plot_lengths(results, curves):
    by = [name for name in _LENGTH_GROUPING if name in results]
    return plot_learning_curves(results, curves, by=by, panels=["dataset", "alpha"])


def _plot_sample_counts(results, curves):
    by, panels = ["dataset", "alpha"], ["dataset"]
    figure = plot_metric_vs_setting(results, x="options.num_samples", by=by, panels=panels)
    for panel in figure.axes:
        panel.set_xlabel("Synthetic samples")
    return figure


fig5_length = make_table_program(
    FIG5_LENGTH, make_figure_writer("fig5_length", _plot_lengths, by=_LENGTH_GROUPING)
)
fig5_samples = make_table_program(
    FIG5_SAMPLES, make_figure_writer("fig5_samples", _plot_sample_counts, by=_SAMPLES_GROUPING)
)


def _run_both(argv: Sequence[str] | None = None) -> int:
    return fig5_length(argv) or fig5_samples(argv)  # a failure of the first ends both


fig5 = _run_both
"""DynaFed's Figure 5: how long its trajectory is, and how many synthetic samples it has.

    python experiments/dynafed/fig5.py                  the embedded digits, minutes on 2 cores
    python experiments/dynafed/fig5.py --preset cpu     Fashion-MNIST, MLP: half an hour a seed
    python experiments/dynafed/fig5.py --preset paper   CIFAR-10: a GPU's work

`fig5_length.png`: learning curves by trajectory length L, with methods that have no trajectory, at
alpha = .01. `fig5_samples.png`: accuracy against the number of synthetic samples, a line per alpha.
The filters hold for both halves.
"""
