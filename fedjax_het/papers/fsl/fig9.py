"""FSL's Figure 9: distance of the server's and clients' gradients from the gradient of all data.

python experiments/fsl/fig9.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig9.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig9.py --preset paper   EMNIST and CIFAR-10: a GPU's work

Distances are squared distances from the gradient over all clients' data, at the initial model of a
round. xi_t^2 is the distance of the gradient over the server's data. G_t^2 is the mean over clients
of the distance of the gradient over a client's data. Runs have one round more, so that x_1000 is
measured, too. The runs are FSL at gamma = 1; the paper does not state its runs.

`fig9_terms.png`: the terms of Theorem 1 with these distances in place of their bounds, at the
largest step that its condition (13) allows. The theorem guarantees that F~ decreases where descent
is above the sum of the others.

`fig9_angle.png`: cosine of the angle between the server's gradient and the gradient of all data. By
(8) a small step of the server lowers F where the cosine is positive.
"""

from dataclasses import replace

import numpy as np

from fedjax_het.analysis import plot_gradient_gaps
from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.figures.style import (
    PALETTE,
    add_legend,
    label_outer_axes,
    make_panels,
    style_axes,
)
from fedjax_het.data import load_dataset
from fedjax_het.papers.convergence_bounds import ProgressTerms, compute_progress_terms
from fedjax_het.papers.dynafed.theory import gradient_curves
from fedjax_het.papers.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1, with_rows
from fedjax_het.papers.table import Preset, TableRun, make_figure_writer, make_table_program
from fedjax_het.runtime.data_assignment import build_partition
from fedjax_het.runtime.results import Result

GROUPING = ("dataset", "classes", "server_options.size")
TERM_COLORS = {"descent": "#0072B2", "noise": "#E69F00", "drift": "#D55E00"}


def _list_rows(*sizes: int) -> tuple[str, ...]:
    return tuple(f"fsl(n0={size})" for size in sizes)


def with_gradient_measurements(preset: Preset, interval: int, rounds: int) -> Preset:
    """Return a preset that measures gradients, with one round more.

    Args:
      preset: the preset.
      interval: number of rounds between measurements.
      rounds: number of rounds, at whose end the model is measured, too.

    Returns:
      The preset.
    """
    overrides = {}
    for name, override in preset.dataset_overrides.items():
        own = dict(override.settings)
        own |= {"rounds": own["rounds"] + 1} if "rounds" in own else {}
        overrides[name] = replace(override, settings=own)
    settings = {**preset.settings, "gradient_gaps": interval, "rounds": rounds + 1}
    return replace(preset, settings=settings, dataset_overrides=overrides)


FIG9 = replace(
    SCENARIO1,
    name="fsl-fig9",
    item="fig9",
    title="FSL, Figure 9: gradients of the server and of clients.",
    presets={
        "quick": with_gradient_measurements(with_rows(QUICK, _list_rows(20, 50)), 3, 60),
        "cpu": with_gradient_measurements(with_rows(CPU, _list_rows(200, 500)), 5, 200),
        "paper": with_gradient_measurements(
            with_rows(PAPER, {"emnist_45": _list_rows(90, 225), "cifar10": _list_rows(200, 500)}),
            50,
            1000,
        ),
    },
)


def _plot_gaps(results, curves):
    by = ["server_options.size"]
    return plot_gradient_gaps(results, curves, by=by, panels=["dataset", "classes"])


def compute_terms(result: Result) -> tuple[np.ndarray, ProgressTerms]:
    """Return the measured rounds t >= 0, and the terms of Theorem 1 at x_t."""
    spec = result.spec.resolved()
    dataset = load_dataset(spec.dataset, normalization=spec.normalization)
    sizes = build_partition(spec, dataset).sizes
    num_clients, size = len(sizes), spec.server_options["size"]
    local_epochs, batch_size, participation = spec.local_epochs, spec.batch_size, spec.participation
    assert local_epochs is not None and batch_size is not None and participation is not None
    # Default of option `server_epochs` in `algorithms.fsl`.
    epochs = spec.options["server_epochs"] or -(-sizes.sum() * local_epochs // (num_clients * size))
    terms = compute_progress_terms(
        result.metrics,
        gamma=spec.hyperparameters["gamma"],
        server_lr=spec.hyperparameters["server_lr"],
        num_clients=num_clients,
        cohort_size=max(1, round(participation * num_clients)),
        client_steps=local_epochs * float(np.ceil(sizes[sizes > 0] / batch_size).mean()),
        server_steps=epochs * -(-size // batch_size),
    )
    rounds = np.flatnonzero(np.isfinite(terms.descent))
    curves = (values[rounds] for values in terms[2:])
    return rounds, ProgressTerms(*terms[:2], *curves)


def plot_terms(table_run: TableRun):
    """Plot geometric means over seeds, a panel for each data set, number of classes and size."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter

    groups: dict[str, list[tuple[np.ndarray, ProgressTerms]]] = {}
    for cell, result in table_run.iterate_results():
        title = f"{cell.column_label}, {format_row(cell.method)}"
        groups.setdefault(title, []).append(compute_terms(result))
    figure, panels = make_panels(list(groups), columns=2, size=(3.8, 2.8), sharey="none")
    label_outer_axes(panels.values(), x="Round t", y="Term of Theorem 1")
    for (title, runs), panel in zip(groups.items(), panels.values(), strict=True):
        for name, color in TERM_COLORS.items():
            mean = np.mean([np.log10(getattr(terms, name)) for _, terms in runs], axis=0)
            panel.plot(runs[0][0], 10**mean, color=color, lw=1.6)
        panel.set_yscale("log")
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_title(f"{title}\nK0 eta0 L = {runs[0][1].step:.3g}", fontsize=9)
        style_axes(panel)
    handles = [Line2D([], [], color=color, lw=2, label=name) for name, color in TERM_COLORS.items()]
    add_legend(figure, handles)
    return figure


def plot_angles(table_run: TableRun):
    """Plot the cosine of grad f_0 and grad F, a panel per column and a line per seed and row."""
    from matplotlib.lines import Line2D

    groups: dict[str, list[tuple[str, dict[str, np.ndarray]]]] = {}
    for cell, result in table_run.iterate_results():
        line = format_row(cell.method), gradient_curves(result)
        groups.setdefault(cell.column_label, []).append(line)
    figure, panels = make_panels(list(groups), columns=3, size=(3.6, 2.6), sharey="all")
    label_outer_axes(panels.values(), x="Round t", y="cos(grad f_0, grad F)")
    rows = dict.fromkeys(row for own in groups.values() for row, _ in own)
    colors = dict(zip(rows, PALETTE, strict=False))
    for title, panel in panels.items():
        for row, curves in groups[title]:
            panel.plot(curves["round"], curves["cosine"], color=colors[row], lw=1.2, alpha=0.7)
        panel.axhline(0.0, color="#666666", lw=0.8, ls="--")
        style_axes(panel)
    add_legend(figure, [Line2D([], [], color=color, lw=2, label=r) for r, color in colors.items()])
    return figure


def _write_outputs(table_run: TableRun) -> list[str]:
    write = make_figure_writer("fig9", _plot_gaps, by=GROUPING, metric="window_accuracy")
    names = write(table_run)
    if not names:
        return []
    figures = {"fig9_terms.png": plot_terms(table_run), "fig9_angle.png": plot_angles(table_run)}
    return [*names, *table_run.write_figures(figures)]


main = make_table_program(FIG9, _write_outputs)
