"""FSL's Figure 9: how unlike all clients' data the server's, and a client's, are for the gradient.

python experiments/fsl/fig9.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig9.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig9.py --preset paper   EMNIST and CIFAR-10: a GPU's work

The squared distances of the gradient over the server's data (xi_t^2), and of those over a client's
(G_t^2, mean over clients), from that over all clients' data, at the model that a round starts from.
Of FSL at gamma = 1; the paper does not say of which runs its figure is.
"""

from dataclasses import replace

from experiments.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1, with_rows
from fedjax_het.report import plot_gradient_gaps
from fedjax_het.report.paper_table import program, write_drawing

BY = ("dataset", "classes", "server_options.size")


def rows(*sizes: int) -> tuple[str, ...]:
    return tuple(f"fsl(n0={size})" for size in sizes)


def measured(preset, every: int):
    return replace(preset, settings={**preset.settings, "gradient_gaps": every})


FIG9 = replace(
    SCENARIO1,
    name="fsl-fig9",
    item="fig9",
    title="FSL, Figure 9: gradients of the server and of clients.",
    presets={
        "quick": measured(with_rows(QUICK, rows(20, 50)), 3),
        "cpu": measured(with_rows(CPU, rows(200, 500)), 5),
        "paper": measured(
            with_rows(PAPER, {"emnist_45": rows(90, 225), "cifar10": rows(200, 500)}),
            50,
        ),
    },
)


def draw(results, curves):
    by = ["server_options.size"]
    return plot_gradient_gaps(results, curves, by=by, panels=["dataset", "classes"])


main = program(FIG9, write_drawing("fig9", draw, by=BY, measure="window_accuracy"))

if __name__ == "__main__":
    raise SystemExit(main())
