"""The pictures of one run, drawn from its result."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fedjax_het.common.pictures import plain_axes, write_figure
from fedjax_het.common.text import figure_text
from fedjax_het.data import Dataset, Partition, client_groups, plot_partition
from fedjax_het.measures.personal import mean_accuracies
from fedjax_het.report.line_ends import End, name_ends
from fedjax_het.report.style import GREYS, PALETTE, add_note, whole_ticks
from fedjax_het.running.result import Result


def draw_run(result: Result, dataset: Dataset, partition: Partition, directory: str | Path) -> None:
    """Write `curve.png`, `partition.png` and, for a method that makes images, `synthesis.png` and
    `synthesis.gif` or `condensed.png`, for one whose clients learn from each other
    `collaboration.png`, and `collaboration.gif` where its rounds were recorded (option history)."""
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
        _plot_snapshots(result.artifacts, dataset, directory / "synthesis")
    if len(result.artifacts.get("condensed_images", ())):
        _plot_condensed(result.artifacts, dataset, directory / "condensed.png")
    if "collaboration" in result.artifacts:
        _plot_collaboration(result, partition, directory / "collaboration")


def plot_curve(result: Result, path: str | Path) -> None:
    """Test accuracy against the round, and below it the training loss.

    Where clients have tests of their own: their mean accuracy, in a band from the 10th to the 90th
    percentile of the clients; besides the global model's on all test images, if there is one.
    """
    from matplotlib.figure import Figure

    spec = result.spec
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes, loss = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    rounds = 1 + np.arange(spec.rounds)
    ends = []
    if "client_accuracy" in result.metrics:
        ends += _draw_clients(axes, rounds, 100 * result.metrics["client_accuracy"])
    accuracy = 100 * result.metrics["test_accuracy"]
    known = np.isfinite(accuracy)
    if known.any() or not ends:
        colour = GREYS[0] if ends else PALETTE[0]
        name = "global model on all tests" if ends else "all test images"
        (line,) = axes.plot(rounds[known], accuracy[known], label=name, color=colour, lw=1.6)
        line.set_marker("o" if known.sum() == 1 else "")
        ends += [End(name, accuracy[known][-1], colour)] if known.any() else []
    trained = result.metrics["train_loss"]
    loss.plot(rounds, trained, color=PALETTE[1], lw=1.2, label="training loss")
    for panel in (axes, loss):
        plain_axes(panel)
    axes.set(ylabel="Test accuracy (%)", xlim=(1, max(2, spec.rounds)))
    whole_ticks(axes)
    condensed = "condensed_images" in result.artifacts
    kind = "Loss of condensation" if condensed else "Training loss\nof clients (nats)"
    loss.set(xlabel="Round", ylabel=kind, ylim=(0, None))
    split = spec.partition + (f", alpha {spec.alpha:g}" if spec.alpha is not None else "")
    end = f"; diverged in round {result.summary['rounds']}" if result.summary["diverged"] else ""
    title = f"{spec.algorithm} on {spec.dataset}, {spec.model}, {split}{end}"
    axes.set_title(figure_text(title), fontsize=10)
    name_ends(figure, {axes: ends})
    band = "client_accuracy" in result.metrics
    add_note(figure, "band: from the 10th to the 90th percentile of clients" if band else "")
    write_figure(path, figure)


def _draw_clients(axes, rounds: np.ndarray, accuracies: np.ndarray) -> list[End]:
    """The mean over clients and its band, of percentages [rounds, K]; the mean's end."""
    mean = mean_accuracies(accuracies)
    known = np.isfinite(mean)
    rounds, mean, accuracies = rounds[known], mean[known], accuracies[known]
    name, colour = "mean of clients' own tests", PALETTE[0]
    axes.plot(rounds, mean, color=colour, lw=1.6, label=name)
    tested = np.isfinite(accuracies).any(0)
    low, high = np.percentile(accuracies[:, tested], (10, 90), axis=1) if len(mean) else ([], [])
    axes.fill_between(rounds, low, high, color=colour, alpha=0.15, lw=0)
    return [End(name, float(mean[-1]), colour)] if len(mean) else []


def _plot_collaboration(result: Result, partition: Partition, stem: Path) -> None:
    from fedjax_het.report import plot_collaboration
    from fedjax_het.report.animation import animate_collaboration

    groups = client_groups(partition) if "clients_per_group" in partition.parameters else None
    title = f"{result.spec.algorithm} on {result.spec.dataset}"
    figure = plot_collaboration(
        result.artifacts["collaboration"],
        groups,
        titles=[f"{title}, round {result.summary['rounds']}"],
    )
    write_figure(stem.with_suffix(".png"), figure)
    if "collaboration" in result.metrics:
        weights = result.metrics["collaboration"][: result.summary["rounds"]]
        animate_collaboration(weights, stem.with_suffix(".gif"), groups, title=title)


def _plot_snapshots(artifacts: dict[str, np.ndarray], dataset: Dataset, stem: Path) -> None:
    from fedjax_het.condensation import SyntheticData
    from fedjax_het.report.animation import animate_synthesis
    from fedjax_het.report.synthetic_images import plot_synthesis

    logits = artifacts["synthetic_label_logits"][artifacts["snapshot_samples"]]
    steps = zip(artifacts["snapshot_iterations"], artifacts["snapshots"], strict=True)
    snapshots = {int(n): SyntheticData(images, logits, jnp.float32(0)) for n, images in steps}
    names = dataset.class_names or None
    plot_synthesis(snapshots, stem.with_suffix(".png"), class_names=names)
    animate_synthesis(snapshots, stem.with_suffix(".gif"), class_names=names)


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
