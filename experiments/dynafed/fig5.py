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

from experiments.dynafed.settings import EXPERIMENT, PRESETS
from fedjax_het.report import plot_against, plot_learning_curves
from fedjax_het.report.paper_table import program, write_drawing

# The caption has 15 twice, the text 25.
LENGTHS = {"quick": (10, 20), "cpu": (10, 15, 20, 25), "paper": (10, 15, 20, 25)}
# The paper names 150 alone.
SAMPLES = {"quick": (50, 150), "cpu": (50, 150, 300), "paper": (50, 100, 150, 200, 300)}
RIVALS = ("fedavg", "fedgen")


def both(rows, **changes):
    """`rows(name)` of the preset of each name."""
    small: dict[str, dict[str, Any]] = {
        "quick": {"alphas": (0.01, 0.04), "seeds": (0,)},
        "cpu": {"alphas": (0.01,), "models": ("mlp",), "model_settings": {}, "about": ""},
        "paper": {},
    }
    return {
        name: replace(preset, rows=tuple(rows(name)), **{**small[name], **changes})
        for name, preset in PRESETS.items()
    }


def of_lengths(name: str):
    return (*RIVALS, *(f"dynafed(trajectory_rounds={length})" for length in LENGTHS[name]))


def of_numbers(name: str):
    return (f"dynafed(num_samples={number})" for number in SAMPLES[name])


LENGTH = EXPERIMENT(
    name="dynafed-fig5",
    folder="dynafed-fig5",
    item="fig5",
    title="DynaFed, Figure 5, left: test accuracy by the length of the trajectory.",
    reported=False,
    presets=both(of_lengths, alphas=(0.01,)),
)
NUMBER = replace(
    LENGTH,
    title="DynaFed, Figure 5, right: test accuracy by the number of synthetic samples.",
    presets=both(of_numbers),
)
BY_LENGTH = ("dataset", "alpha", "algorithm", "options.trajectory_rounds")
BY_NUMBER = ("dataset", "alpha", "options.num_samples")


def draw_lengths(results, curves):
    by = [name for name in BY_LENGTH if name in results]
    return plot_learning_curves(results, curves, by=by, panels=["dataset", "alpha"])


def draw_numbers(results, curves):
    figure = plot_against(
        results, x="options.num_samples", by=["dataset", "alpha"], panels=["dataset"]
    )
    for panel in figure.axes:
        panel.set_xlabel("Synthetic samples")
    return figure


HALVES = (
    program(LENGTH, write_drawing("fig5_length", draw_lengths, by=BY_LENGTH)),
    program(NUMBER, write_drawing("fig5_samples", draw_numbers, by=BY_NUMBER)),
)


def main(argv: Sequence[str] | None = None) -> int:
    for half in HALVES:
        if status := half(argv):
            return status  # what stops the one stops the other
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
