"""FSL's Figures 1, 2, 5 to 8, 10 and 11: accuracies in its two scenarios."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

from fedjax_het.analysis import plot_heat_map, plot_learning_curves, plot_metric_vs_setting
from fedjax_het.metrics.convergence import WINDOW
from fedjax_het.papers.fsl.scenarios import (
    CPU,
    CPU_SCENARIO2,
    PAPER,
    QUICK,
    QUICK_SCENARIO2,
    SCENARIO1,
    SCENARIO2,
    pretraining_settings,
    with_rows,
)
from fedjax_het.papers.programs import ProgramMain
from fedjax_het.papers.table import (
    DatasetOverride,
    TableDeclaration,
    make_figure_writer,
    make_table_program,
)

GAMMAS = (0.5, 1.0, 1.5, 2.0)


def _make_program(experiment: TableDeclaration, draw: Callable, by: tuple[str, ...]) -> ProgramMain:
    writer = make_figure_writer(experiment.item, draw, by=by, metric="window_accuracy")
    return make_table_program(experiment, writer)


def _plot_curves(results, curves, *, by: tuple[str, ...], panels: tuple[str, ...]):
    by = tuple(name for name in by if name in results)
    return plot_learning_curves(results, curves, by=by, panels=panels, window=WINDOW)


def _plot_metrics_vs_gamma(results, curves, *, lines: tuple[str, ...]):
    """Plot accuracy and rise time against gamma; data sharing is at 0."""
    panels, metrics = ("dataset", "classes"), ("window_accuracy", "rise_time")
    by = [*panels, *lines]
    return plot_metric_vs_setting(
        results, x="hp.gamma", by=by, panels=panels, metrics=metrics, missing_value=0.0
    )


def _list_gamma_rows(smallest: float) -> tuple[str, ...]:
    return ("fedavg", "data_sharing", *(f"fsl(gamma={g})" for g in (smallest, *GAMMAS)))


FIG1 = replace(
    SCENARIO1,
    title="FSL, Figure 1: test accuracy by labels per client.",
    presets={
        "quick": with_rows(QUICK, _list_gamma_rows(0.35)),
        "cpu": CPU,
        "paper": with_rows(
            PAPER, {"emnist_45": _list_gamma_rows(0.09375), "cifar10": _list_gamma_rows(0.1)}
        ),
    },
)
_FIG1_GROUPING = ("dataset", "classes", "algorithm", "hp.gamma")
_plot_fig1 = partial(_plot_curves, by=_FIG1_GROUPING, panels=("dataset", "classes"))
fig1 = _make_program(FIG1, _plot_fig1, _FIG1_GROUPING)
"""FSL's Figure 1: accuracy by labels per client, of FL, data sharing and FSL at several gamma.

    python experiments/fsl/fig1.py                  the embedded digits, a minute on 2 cores
    python experiments/fsl/fig1.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
    python experiments/fsl/fig1.py --preset paper   EMNIST and CIFAR-10: a GPU's work

FSL and data sharing start from a model that the server has pretrained, FL from a random one (in
preset cpu all do). The smallest gamma is N n_0 / n, at which FSL has the objective of data sharing.
Figure 6 is the same without pretraining.
"""

FIG6 = replace(
    FIG1,
    name="fsl-fig6",
    item="fig6",
    title="FSL, Figure 6: test accuracy by labels per client, without pretraining.",
    settings={"pretrain_epochs": 0},
    presets={
        name: replace(preset, method_settings=pretraining_settings(0))
        for name, preset in FIG1.presets.items()
    },
)
fig6 = _make_program(FIG6, _plot_fig1, _FIG1_GROUPING)
"""FSL's Figure 6: Figure 1 without pretraining.

    python experiments/fsl/fig6.py                  the embedded digits, a minute on 2 cores
    python experiments/fsl/fig6.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
    python experiments/fsl/fig6.py --preset paper   EMNIST and CIFAR-10: a GPU's work

The runs of FL are shared with Figure 1, as are all runs of preset cpu.
"""


def _list_rate_size_rows(
    gammas: tuple[float, ...], rates: tuple[float, ...], sizes: tuple[int, ...]
) -> tuple[str, ...]:
    methods = ("data_sharing(", *(f"fsl(gamma={g}, " for g in gammas))
    return tuple(f"{m}local_lr={lr}, n0={n})" for lr, n, m in product(rates, sizes, methods))


_FIG2_LINES = ("hp.local_lr", "server_options.size")
# The paper's text names 90 and 225 images for EMNIST, and learning rates of .01 and .05; the
# figure's other values are not known.
FIG2 = replace(
    SCENARIO1,
    name="fsl-fig2",
    item="fig2",
    title="FSL, Figure 2: test accuracy and rise time against gamma.",
    presets={
        "quick": replace(
            QUICK,
            classes=(1, 2),
            rows=_list_rate_size_rows((0.35, *GAMMAS), (0.02, 0.05), (20, 50)),
        ),
        "cpu": with_rows(CPU, CPU.rows[1:]),
        "paper": replace(
            PAPER,
            dataset_overrides={
                "emnist_45": DatasetOverride(
                    classes=(1, 5),
                    rows=_list_rate_size_rows((0.09375, *GAMMAS), (0.01, 0.05), (90, 225)),
                ),
                "cifar10": DatasetOverride(
                    classes=(2, 5),
                    rows=_list_rate_size_rows((0.1, *GAMMAS), (0.01, 0.05), (200, 500)),
                ),
            },
        ),
    },
)
fig2 = _make_program(
    FIG2,
    partial(_plot_metrics_vs_gamma, lines=_FIG2_LINES),
    ("dataset", "classes", *_FIG2_LINES, "algorithm", "hp.gamma"),
)
"""FSL's Figure 2: accuracy and rise time against gamma, by local learning rate and server data.

    python experiments/fsl/fig2.py                  the embedded digits, a minute on 2 cores
    python experiments/fsl/fig2.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
    python experiments/fsl/fig2.py --preset paper   EMNIST and CIFAR-10: a GPU's work

As in the paper, the values at gamma = 0 are from data sharing, which is better than FL. Preset
cpu is drawn from runs of Figure 1.
"""

# Learning rates other than .01 and .05, and the numbers of labels are chosen here: the figure's
# values are not known.
_COMPARED_METHODS = ("fsl", "fslsyn", "feddyn", "scaffold")


def _list_rate_rows(methods: tuple[str, ...], rates: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(f"{method}(local_lr={rate})" for method, rate in product(methods, rates))


FIG5 = replace(
    SCENARIO2,
    name="fsl-fig5",
    item="fig5",
    title="FSL, Figure 5: test accuracy over local learning rate and labels per client.",
    presets={
        "quick": with_rows(QUICK_SCENARIO2, _list_rate_rows(_COMPARED_METHODS, (0.02, 0.05, 0.1))),
        "cpu": replace(
            CPU_SCENARIO2,
            rows=_list_rate_rows(("fsl", "feddyn", "scaffold", "fedavg"), (0.02, 0.05, 0.1)),
            seeds=(0,),
        ),
        "paper": replace(
            PAPER,
            classes=(1, 2, 5, 10),
            rows=_list_rate_rows(_COMPARED_METHODS, (0.01, 0.02, 0.05, 0.1)),
            dataset_overrides={},
        ),
    },
)
_FIG5_GROUPING = ("dataset", "classes", "hp.local_lr", "algorithm", "server_data")


def _plot_accuracy_grid(results, curves):
    by = [name for name in ("dataset", "algorithm", "server_data") if name in results]
    return plot_heat_map(results, x="classes", y="hp.local_lr", by=by, metric="window_accuracy")


fig5 = _make_program(FIG5, _plot_accuracy_grid, _FIG5_GROUPING)
"""FSL's Figure 5: accuracy over local learning rate and labels per client, many clients.

    python experiments/fsl/fig5.py                  the embedded digits, a minute on 2 cores
    python experiments/fsl/fig5.py --preset cpu     CIFAR-10, 1,000 clients of two labels: hours
    python experiments/fsl/fig5.py --preset paper   EMNIST and CIFAR-10: a GPU's work

Methods are FSL with the data of a few clients at the server, FSL with other images at the server
(drawn glyphs, STL-10), FedDyn and SCAFFOLD. gamma is 1, FedDyn's alpha .01. Figures 10 and 11 are
the learning curves of the same runs.
"""


def _make_curves_declaration(dataset: str, item: str) -> TableDeclaration:
    """Return Figure 5 with one data set in preset paper."""
    paper = replace(FIG5.presets["paper"], datasets=(dataset,))
    return replace(
        FIG5,
        name=f"fsl-{item}",
        item=item,
        title=f"FSL, Figure {item.removeprefix('fig')}: learning curves of Figure 5.",
        presets={**FIG5.presets, "paper": paper},
    )


_RATE_PANELS = ("hp.local_lr", "classes")
_plot_rate_curves = partial(
    _plot_curves, by=(*_RATE_PANELS, "algorithm", "server_data"), panels=_RATE_PANELS
)
FIG10 = _make_curves_declaration("cifar10", "fig10")
fig10 = _make_program(FIG10, _plot_rate_curves, _FIG5_GROUPING)
"""FSL's Figure 10: the learning curves of Figure 5 on CIFAR-10, from the same runs.

    python experiments/fsl/fig10.py                  the embedded digits, a minute on 2 cores
    python experiments/fsl/fig10.py --preset cpu     CIFAR-10, fewer rounds: hours
    python experiments/fsl/fig10.py --preset paper   CIFAR-10: a GPU's work
"""

FIG11 = _make_curves_declaration("emnist_45", "fig11")
fig11 = _make_program(FIG11, _plot_rate_curves, _FIG5_GROUPING)
"""FSL's Figure 11: the learning curves of Figure 5 on EMNIST, from the same runs.

    python experiments/fsl/fig11.py                  the embedded digits, a minute on 2 cores
    python experiments/fsl/fig11.py --preset paper   EMNIST: a GPU's work
"""


def _list_cohort_rows(*cohort_sizes: int, settings: str = "") -> tuple[str, ...]:
    methods = ("data_sharing", "fsl", "fsl_p")
    return tuple(f"{m}(S={size}{settings})" for size, m in product(cohort_sizes, methods))


_FIG7_PANELS = ("dataset", "participation", "classes")
# The numbers of clients a round are chosen here: the figure's are not known.
FIG7 = replace(
    SCENARIO1,
    name="fsl-fig7",
    item="fig7",
    title="FSL, Figure 7: FSL, FSL-p and data sharing.",
    presets={
        "quick": with_rows(QUICK, _list_cohort_rows(2, 4)),
        "cpu": with_rows(CPU, _list_cohort_rows(4)),
        "paper": with_rows(
            PAPER,
            {
                "emnist_45": _list_cohort_rows(5, 10),
                "cifar10": _list_cohort_rows(2, 4, settings=", n0=200"),
            },
        ),
    },
)
_FIG7_GROUPING = (*_FIG7_PANELS, "algorithm")
_plot_fig7 = partial(_plot_curves, by=_FIG7_GROUPING, panels=_FIG7_PANELS)
fig7 = _make_program(FIG7, _plot_fig7, _FIG7_GROUPING)
"""FSL's Figure 7: FSL, its non-incremental form and data sharing, by labels and clients a round.

    python experiments/fsl/fig7.py                  the embedded digits, a minute on 2 cores
    python experiments/fsl/fig7.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
    python experiments/fsl/fig7.py --preset paper   EMNIST and CIFAR-10: a GPU's work

gamma is 1. On CIFAR-10 the server has 200 images, fewer than elsewhere in the paper.
"""


def _list_fig8_rows(*gammas: float) -> tuple[str, ...]:
    rows = (f"{m}(gamma={g})" for m, g in product(("fsl", "fsl_p"), gammas))
    return ("data_sharing", *rows)


FIG8 = replace(
    SCENARIO1,
    name="fsl-fig8",
    item="fig8",
    title="FSL, Figure 8: FSL, FSL-p and data sharing against gamma.",
    presets={
        "quick": replace(QUICK, classes=(2,), rows=_list_fig8_rows(0.35, *GAMMAS)),
        "cpu": with_rows(CPU, _list_fig8_rows(*GAMMAS[:3])),
        "paper": replace(
            PAPER,
            dataset_overrides={
                "emnist_45": DatasetOverride(classes=(5,), rows=_list_fig8_rows(0.09375, *GAMMAS)),
                "cifar10": DatasetOverride(classes=(2,), rows=_list_fig8_rows(0.1, *GAMMAS)),
            },
        ),
    },
)
fig8 = _make_program(
    FIG8,
    partial(_plot_metrics_vs_gamma, lines=("algorithm",)),
    ("dataset", "classes", "algorithm", "hp.gamma"),
)
"""FSL's Figure 8: accuracy and rise time against gamma, of FSL and its non-incremental form.

    python experiments/fsl/fig8.py                  the embedded digits, a minute on 2 cores
    python experiments/fsl/fig8.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
    python experiments/fsl/fig8.py --preset paper   EMNIST and CIFAR-10: a GPU's work

As in the paper, data sharing is shown at gamma = 0.
"""
