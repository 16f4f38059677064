"""The pictures of one run, drawn from its result."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fedjax_het.common.pictures import write_figure
from fedjax_het.common.text import figure_text
from fedjax_het.data import Dataset, Partition, client_groups, plot_partition
from fedjax_het.measures.personal import mean_accuracies
from fedjax_het.report.style import whole_ticks
from fedjax_het.running.result import Result


def draw_run(result: Result, dataset: Dataset, partition: Partition, directory: str | Path) -> None:
    """Write `curve.png`, `partition.png` and, for a method that makes images, `synthesis.png` or
    `condensed.png`, for one whose clients learn from each other `collaboration.png`."""
    directory = Path(directory)
    plot_curve(result, directory / "curve.png")
    plot_partition(
        partition,
        dataset.train_labels,
        dataset.num_classes,
        directory / "partition.png",
        class_names=dataset.class_names,
    )
    if "snapshots" in result.artifacts:
        _plot_snapshots(result.artifacts, dataset, directory / "synthesis.png")
    if len(result.artifacts.get("condensed_images", ())):
        _plot_condensed(result.artifacts, dataset, directory / "condensed.png")
    if "collaboration" in result.artifacts:
        _plot_collaboration(result, partition, directory / "collaboration.png")


def plot_curve(result: Result, path: str | Path) -> None:
    """Test accuracy and training loss against the round.

    Where clients have tests of their own: their mean accuracy, in a band from the 10th to the 90th
    percentile of the clients; besides the global model's on all test images, if there is one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spec = result.spec
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rounds = 1 + np.arange(spec.rounds)
    handles = []
    if "client_accuracy" in result.metrics:
        handles += _draw_clients(axes, rounds, 100 * result.metrics["client_accuracy"])
    accuracy = 100 * result.metrics["test_accuracy"]
    known = np.isfinite(accuracy)
    if known.any() or not handles:
        look = {"ls": "--", "lw": 1.2, "color": "#555555"} if handles else {"color": "#0072B2"}
        label = "global model on all tests" if handles else "test accuracy"
        handles += axes.plot(rounds[known], accuracy[known], label=label, **look)
    axes.set(xlabel="round", ylabel="test accuracy (%)", xlim=(1, max(2, spec.rounds)))
    whole_ticks(axes)
    axes.grid(alpha=0.3)
    loss = axes.twinx()
    handles += loss.plot(
        rounds, result.metrics["train_loss"], color="#D55E00", lw=1, label="training loss"
    )
    condensed = "condensed_images" in result.artifacts
    kind = "loss of condensation" if condensed else "local training loss (nats)"
    loss.set(ylabel=kind, ylim=(0, None))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    split = spec.partition + (f", alpha {spec.alpha:g}" if spec.alpha is not None else "")
    end = f"; diverged in round {result.summary['rounds']}" if result.summary["diverged"] else ""
    title = f"{spec.algorithm} on {spec.dataset}, {spec.model}, {split}{end}"
    axes.set_title(figure_text(title), fontsize=10)
    write_figure(path, figure)


def _draw_clients(axes, rounds: np.ndarray, accuracies: np.ndarray) -> list:
    """The mean over clients and its band, of percentages [rounds, K]; their handles."""
    mean = mean_accuracies(accuracies)
    known = np.isfinite(mean)
    rounds, mean, accuracies = rounds[known], mean[known], accuracies[known]
    line = axes.plot(rounds, mean, color="#0072B2", label="mean of clients' own tests")
    tested = np.isfinite(accuracies).any(0)
    low, high = np.percentile(accuracies[:, tested], (10, 90), axis=1) if len(mean) else ([], [])
    label = "10th to 90th percentile of clients"
    band = axes.fill_between(rounds, low, high, color="#0072B2", alpha=0.15, lw=0, label=label)
    return [*line, band]


def _plot_collaboration(result: Result, partition: Partition, path: Path) -> None:
    from fedjax_het.report import plot_collaboration

    in_groups = "clients_per_group" in partition.parameters
    title = f"{result.spec.algorithm} on {result.spec.dataset}, round {result.summary['rounds']}"
    figure = plot_collaboration(
        result.artifacts["collaboration"],
        client_groups(partition) if in_groups else None,
        titles=[title],
    )
    write_figure(path, figure)


def _plot_snapshots(artifacts: dict[str, np.ndarray], dataset: Dataset, path: Path) -> None:
    from fedjax_het.condensation import SyntheticData
    from fedjax_het.report.synthetic_images import plot_synthesis

    logits = artifacts["synthetic_label_logits"][artifacts["snapshot_samples"]]
    steps = zip(artifacts["snapshot_iterations"], artifacts["snapshots"], strict=True)
    plot_synthesis(
        {int(n): SyntheticData(images, logits, jnp.float32(0)) for n, images in steps},
        path,
        class_names=dataset.class_names,
    )


def _plot_condensed(artifacts: dict[str, np.ndarray], dataset: Dataset, path: Path) -> None:
    from fedjax_het.report.synthetic_images import plot_condensed

    plot_condensed(
        artifacts["condensed_images"],
        artifacts["condensed_clients"],
        artifacts["condensed_classes"],
        path,
        class_names=dataset.class_names or None,
        mean=dataset.mean,
        std=dataset.std,
    )
