"""DynaFed's Figure 5: how long its trajectory is, and how many synthetic samples it has.

python experiments/dynafed/fig5.py                  the embedded digits, minutes on 2 cores
python experiments/dynafed/fig5.py --preset cpu     Fashion-MNIST, MLP: half an hour a seed
python experiments/dynafed/fig5.py --preset paper   CIFAR-10: a GPU's work

`fig5_length.png`: learning curves by trajectory length L, with methods that have no trajectory, at
alpha = .01. `fig5_samples.png`: accuracy against the number of synthetic samples, a line per alpha.
The filters hold for both halves.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedjax_het.analysis import plot_learning_curves, plot_metric_vs_setting
from fedjax_het.papers.dynafed.settings import EXPERIMENT, PRESETS
from fedjax_het.papers.table import make_figure_writer, make_table_program

# The caption has 15 twice, the text 25.
LENGTHS = {"quick": (10, 20), "cpu": (10, 15, 20, 25), "paper": (10, 15, 20, 25)}
# The paper names 150 alone.
SAMPLES = {"quick": (50, 150), "cpu": (50, 150, 300), "paper": (50, 100, 150, 200, 300)}
BASELINES = ("fedavg", "fedgen")


def make_presets(rows, **changes):
    """`rows(name)` of the preset of each name."""
    preset_overrides: dict[str, dict[str, Any]] = {
        "quick": {"alphas": (0.01, 0.04), "seeds": (0,)},
        "cpu": {"alphas": (0.01,), "models": ("mlp",), "model_settings": {}, "description": ""},
        "paper": {},
    }
    return {
        name: replace(preset, rows=tuple(rows(name)), **{**preset_overrides[name], **changes})
        for name, preset in PRESETS.items()
    }


def trajectory_length_rows(name: str):
    return (*BASELINES, *(f"dynafed(trajectory_rounds={length})" for length in LENGTHS[name]))


def sample_count_rows(name: str):
    return (f"dynafed(num_samples={number})" for number in SAMPLES[name])


LENGTH_EXPERIMENT = EXPERIMENT(
    name="dynafed-fig5",
    results_folder="dynafed-fig5",
    item="fig5",
    title="DynaFed, Figure 5, left: test accuracy by the length of the trajectory.",
    has_reported_values=False,
    presets=make_presets(trajectory_length_rows, alphas=(0.01,)),
)
SAMPLES_EXPERIMENT = replace(
    LENGTH_EXPERIMENT,
    title="DynaFed, Figure 5, right: test accuracy by the number of synthetic samples.",
    presets=make_presets(sample_count_rows),
)
LENGTH_GROUPING = ("dataset", "alpha", "algorithm", "options.trajectory_rounds")
SAMPLES_GROUPING = ("dataset", "alpha", "options.num_samples")


def plot_trajectory_lengths(results, curves):
    by = [name for name in LENGTH_GROUPING if name in results]
    return plot_learning_curves(results, curves, by=by, panels=["dataset", "alpha"])


def plot_sample_counts(results, curves):
    figure = plot_metric_vs_setting(
        results, x="options.num_samples", by=["dataset", "alpha"], panels=["dataset"]
    )
    for panel in figure.axes:
        panel.set_xlabel("Synthetic samples")
    return figure


HALF_PROGRAMS = (
    make_table_program(
        LENGTH_EXPERIMENT,
        make_figure_writer("fig5_length", plot_trajectory_lengths, by=LENGTH_GROUPING),
    ),
    make_table_program(
        SAMPLES_EXPERIMENT,
        make_figure_writer("fig5_samples", plot_sample_counts, by=SAMPLES_GROUPING),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    for half in HALF_PROGRAMS:
        if status := half(argv):
            return status  # what stops the one stops the other
    return 0
