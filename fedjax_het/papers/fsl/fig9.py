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

from fedjax_het.analysis import plot_gradient_gaps
from fedjax_het.analysis.figure_style import (
    add_legend,
    is_bottom_panel,
    is_leftmost_panel,
    make_panels,
)
from fedjax_het.analysis.figures.output import style_axes, write_figure
from fedjax_het.data import load_dataset
from fedjax_het.papers.convergence_bounds import ProgressTerms, compute_progress_terms
from fedjax_het.papers.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1, with_rows
from fedjax_het.papers.table import TableRun, make_figure_writer, make_table_program
from fedjax_het.runtime.data_assignment import build_partition
from fedjax_het.runtime.results import Result

GROUPING = ("dataset", "classes", "server_options.size")
TERM_COLORS = {"descent": "#0072B2", "noise": "#E69F00", "drift": "#D55E00"}


def make_rows(*sizes: int) -> tuple[str, ...]:
    return tuple(f"fsl(n0={size})" for size in sizes)


def with_gradient_measurements(preset, interval: int, rounds: int):
    """With a round more, before which the model that `rounds` rounds made is measured."""
    dataset_overrides = {
        name: replace(
            override, settings={**override.settings, "rounds": override.settings["rounds"] + 1}
        )
        if "rounds" in override.settings
        else override
        for name, override in preset.dataset_overrides.items()
    }
    settings = {**preset.settings, "gradient_gaps": interval, "rounds": rounds + 1}
    return replace(preset, settings=settings, dataset_overrides=dataset_overrides)


FIG9 = replace(
    SCENARIO1,
    name="fsl-fig9",
    item="fig9",
    title="FSL, Figure 9: gradients of the server and of clients.",
    presets={
        "quick": with_gradient_measurements(with_rows(QUICK, make_rows(20, 50)), 3, 60),
        "cpu": with_gradient_measurements(with_rows(CPU, make_rows(200, 500)), 5, 200),
        "paper": with_gradient_measurements(
            with_rows(PAPER, {"emnist_45": make_rows(90, 225), "cifar10": make_rows(200, 500)}),
            50,
            1000,
        ),
    },
)


def plot_gaps(results, curves):
    by = ["server_options.size"]
    return plot_gradient_gaps(results, curves, by=by, panels=["dataset", "classes"])


def compute_terms(result: Result) -> tuple[np.ndarray, ProgressTerms]:
    """The rounds t >= 0 that were measured, and Theorem 1's terms at x_t."""
    spec = result.spec.resolved()
    dataset = load_dataset(spec.dataset, normalisation=spec.normalisation)
    sizes = build_partition(spec, dataset).sizes
    assert spec.local_epochs is not None
    assert spec.participation is not None and spec.batch_size is not None
    client_steps = spec.local_epochs * float(np.ceil(sizes[sizes > 0] / spec.batch_size).mean())
    num_server_examples = spec.server_options["size"]
    num_client_samples = sizes.sum() * spec.local_epochs
    epochs = spec.options["server_epochs"] or -(
        -num_client_samples // (len(sizes) * num_server_examples)
    )  # as `fsl` has it
    terms = compute_progress_terms(
        result.metrics,
        gamma=spec.hp["gamma"],
        server_lr=spec.hp["server_lr"],
        num_clients=len(sizes),
        cohort_size=max(1, round(spec.participation * len(sizes))),
        client_steps=client_steps,
        server_steps=epochs * -(-num_server_examples // spec.batch_size),
    )
    measured_rounds = np.flatnonzero(np.isfinite(terms.descent))
    return measured_rounds, ProgressTerms(
        terms.step, *(values[measured_rounds] for values in terms[1:])
    )


def plot_terms(table_run: TableRun):
    """A panel for each data set, number of classes and size: mean logarithms over seeds."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter

    panels: dict[str, list[tuple[np.ndarray, ProgressTerms]]] = {}
    for cell, result in table_run.iterate_results():
        panels.setdefault(f"{cell.column_label}, {cell.method}", []).append(compute_terms(result))
    figure, axes = make_panels(list(panels), columns=2, size=(3.8, 2.8), sharey="none")
    for title, panel_terms in panels.items():
        axis = axes[title]
        for name, color in TERM_COLORS.items():
            values = [np.log10(getattr(terms, name)) for _, terms in panel_terms]
            axis.plot(panel_terms[0][0], 10 ** np.mean(values, axis=0), color=color, lw=1.6)
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(NullFormatter())
        if is_leftmost_panel(axis):
            axis.set_ylabel("Term of Theorem 1", fontsize=10)
        if is_bottom_panel(axis, axes.values()):
            axis.set_xlabel("Round t", fontsize=10)
        axis.set_title(f"{title}\nK0 eta0 L = {panel_terms[0][1].step:.3g}", fontsize=9)
        style_axes(axis)
    handles = [Line2D([], [], color=color, lw=2, label=name) for name, color in TERM_COLORS.items()]
    add_legend(figure, handles)
    return figure


def write_outputs(table_run: TableRun) -> list[str]:
    names = make_figure_writer("fig9", plot_gaps, by=GROUPING, metric="window_accuracy")(table_run)
    if not names:
        return []
    write_figure(table_run.directory / "fig9_terms.png", plot_terms(table_run))
    return [*names, "fig9_terms.png"]


main = make_table_program(FIG9, write_outputs)
