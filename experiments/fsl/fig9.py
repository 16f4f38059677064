"""FSL's Figure 9: how unlike all clients' data the server's, and a client's, are for the gradient.

python experiments/fsl/fig9.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig9.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig9.py --preset paper   EMNIST and CIFAR-10: a GPU's work

The squared distances of the gradient over the server's data (xi_t^2), and of those over a client's
(G_t^2, mean over clients), from that over all clients' data, at the model that a round starts from:
so that x_1000 is measured too, runs have a round more. Of FSL at gamma = 1; the paper does not say
of which runs its figure is.

`fig9_terms.png`: the terms of Theorem 1 with these in place of their bounds, at the largest step
that its condition (13) allows: the theorem promises that F~ falls where descent is above the sum of
the others.
"""

from dataclasses import replace

import numpy as np

from experiments.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1, with_rows
from fedjax_het.common.pictures import plain_axes, write_figure
from fedjax_het.data import load_dataset
from fedjax_het.measures.theory import ProgressTerms, progress_terms
from fedjax_het.report import plot_gradient_gaps
from fedjax_het.report.paper_table import Outcome, program, write_drawing
from fedjax_het.report.style import add_legend, is_leftmost, is_lowest, make_panels
from fedjax_het.running.result import Result
from fedjax_het.running.splits import split_clients

BY = ("dataset", "classes", "server_options.size")
TERMS = {"descent": "#0072B2", "noise": "#E69F00", "drift": "#D55E00"}


def rows(*sizes: int) -> tuple[str, ...]:
    return tuple(f"fsl(n0={size})" for size in sizes)


def measured(preset, every: int, rounds: int):
    """With a round more, before which the model that `rounds` rounds made is measured."""
    own = {
        name: replace(each, settings={**each.settings, "rounds": each.settings["rounds"] + 1})
        if "rounds" in each.settings
        else each
        for name, each in preset.of_dataset.items()
    }
    settings = {**preset.settings, "gradient_gaps": every, "rounds": rounds + 1}
    return replace(preset, settings=settings, of_dataset=own)


FIG9 = replace(
    SCENARIO1,
    name="fsl-fig9",
    item="fig9",
    title="FSL, Figure 9: gradients of the server and of clients.",
    presets={
        "quick": measured(with_rows(QUICK, rows(20, 50)), 3, 60),
        "cpu": measured(with_rows(CPU, rows(200, 500)), 5, 200),
        "paper": measured(
            with_rows(PAPER, {"emnist_45": rows(90, 225), "cifar10": rows(200, 500)}),
            50,
            1000,
        ),
    },
)


def draw(results, curves):
    by = ["server_options.size"]
    return plot_gradient_gaps(results, curves, by=by, panels=["dataset", "classes"])


def terms_of(result: Result) -> tuple[np.ndarray, ProgressTerms]:
    """The rounds t >= 0 that were measured, and Theorem 1's terms at x_t."""
    spec = result.spec
    dataset = load_dataset(spec.dataset, normalisation=spec.normalisation)
    sizes = split_clients(spec, dataset).sizes
    assert spec.local_epochs is not None
    assert spec.participation is not None and spec.batch_size is not None
    client_steps = spec.local_epochs * float(np.ceil(sizes[sizes > 0] / spec.batch_size).mean())
    own = spec.server_options["size"]
    seen = sizes.sum() * spec.local_epochs
    epochs = spec.options["server_epochs"] or -(-seen // (len(sizes) * own))  # as `fsl` has it
    found = progress_terms(
        result.metrics,
        gamma=spec.hp["gamma"],
        server_lr=spec.hp["server_lr"],
        num_clients=len(sizes),
        sampled=max(1, round(spec.participation * len(sizes))),
        client_steps=client_steps,
        server_steps=epochs * -(-own // spec.batch_size),
    )
    known = np.flatnonzero(np.isfinite(found.descent))
    return known, ProgressTerms(found.step, *(values[known] for values in found[1:]))


def draw_terms(outcome: Outcome):
    """A panel for each data set, number of classes and size: mean logarithms over seeds."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter

    panels: dict[str, list[tuple[np.ndarray, ProgressTerms]]] = {}
    for cell, result in outcome.made():
        panels.setdefault(f"{cell.group}, {cell.method}", []).append(terms_of(result))
    figure, axes = make_panels(list(panels), columns=2, size=(3.8, 2.8), sharey="none")
    for title, found in panels.items():
        axis = axes[title]
        for name, colour in TERMS.items():
            values = [np.log10(getattr(terms, name)) for _, terms in found]
            axis.plot(found[0][0], 10 ** np.mean(values, axis=0), color=colour, lw=1.6)
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(NullFormatter())
        if is_leftmost(axis):
            axis.set_ylabel("Term of Theorem 1", fontsize=10)
        if is_lowest(axis, axes.values()):
            axis.set_xlabel("Round t", fontsize=10)
        axis.set_title(f"{title}\nK0 eta0 L = {found[0][1].step:.3g}", fontsize=9)
        plain_axes(axis)
    handles = [Line2D([], [], color=colour, lw=2, label=name) for name, colour in TERMS.items()]
    add_legend(figure, handles)
    return figure


def write(outcome: Outcome) -> list[str]:
    names = write_drawing("fig9", draw, by=BY, measure="window_accuracy")(outcome)
    if not names:
        return []
    write_figure(outcome.directory / "fig9_terms.png", draw_terms(outcome))
    return [*names, "fig9_terms.png"]


main = program(FIG9, write)

if __name__ == "__main__":
    raise SystemExit(main())
