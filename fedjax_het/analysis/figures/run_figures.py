"""The pictures of one run, drawn from its result."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fedjax_het.analysis.direct_labels import LineLabel, label_line_ends
from fedjax_het.analysis.figure_style import GRAYS, PALETTE, add_note, set_integer_ticks
from fedjax_het.analysis.figures.data_plots import plot_partition
from fedjax_het.analysis.figures.output import style_axes, write_figure
from fedjax_het.data import Dataset, Partition, get_client_groups
from fedjax_het.metrics.personal import mean_accuracies
from fedjax_het.runtime.results import Result
from fedjax_het.utils.text import escape_mathtext


def write_run_figures(
    result: Result, dataset: Dataset, partition: Partition, directory: str | Path
) -> None:
    """Write `curve.png`, `partition.png` and, for a method that makes images, `synthesis.png` and
    `synthesis.gif` or `condensed.png`, for one whose clients learn from each other
    `collaboration.png`, and `collaboration.gif` where its rounds were recorded (option history)."""
    directory = Path(directory)
    plot_run_curve(result, directory / "curve.png")
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


def plot_run_curve(result: Result, path: str | Path) -> None:
    """Test accuracy against the round, and below it the training loss.

    Where clients have tests of their own: their mean accuracy, in a band from the 10th to the 90th
    percentile of the clients; besides the global model's on all test images, if there is one.
    """
    from matplotlib.figure import Figure

    spec = result.spec.resolved()
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    accuracy_panel, loss_panel = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    rounds = 1 + np.arange(spec.rounds)
    line_labels = []
    if "client_accuracy" in result.metrics:
        line_labels += _draw_client_band(
            accuracy_panel, rounds, 100 * result.metrics["client_accuracy"]
        )
    accuracy = 100 * result.metrics["test_accuracy"]
    is_measured = np.isfinite(accuracy)
    if is_measured.any() or not line_labels:
        color = GRAYS[0] if line_labels else PALETTE[0]
        name = "global model on all tests" if line_labels else "all test images"
        (line,) = accuracy_panel.plot(
            rounds[is_measured], accuracy[is_measured], label=name, color=color, lw=1.6
        )
        line.set_marker("o" if is_measured.sum() == 1 else "")
        line_labels += (
            [LineLabel(name, accuracy[is_measured][-1], color)] if is_measured.any() else []
        )
    train_loss = result.metrics["train_loss"]
    loss_panel.plot(rounds, train_loss, color=PALETTE[1], lw=1.2, label="training loss")
    for panel in (accuracy_panel, loss_panel):
        style_axes(panel)
    accuracy_panel.set(ylabel="Test accuracy (%)", xlim=(1, max(2, spec.rounds)))
    set_integer_ticks(accuracy_panel)
    has_condensed_images = "condensed_images" in result.artifacts
    loss_label = (
        "Loss of condensation" if has_condensed_images else "Training loss\nof clients (nats)"
    )
    loss_panel.set(xlabel="Round", ylabel=loss_label, ylim=(0, None))
    partition_text = spec.partition + (f", alpha {spec.alpha:g}" if spec.alpha is not None else "")
    divergence_text = (
        f"; diverged in round {result.summary['rounds']}" if result.summary["diverged"] else ""
    )
    title = f"{spec.algorithm} on {spec.dataset}, {spec.model}, {partition_text}{divergence_text}"
    accuracy_panel.set_title(escape_mathtext(title), fontsize=10)
    label_line_ends(figure, {accuracy_panel: line_labels})
    has_band = "client_accuracy" in result.metrics
    add_note(figure, "band: from the 10th to the 90th percentile of clients" if has_band else "")
    write_figure(path, figure)


def _draw_client_band(panel, rounds: np.ndarray, accuracies: np.ndarray) -> list[LineLabel]:
    """The mean over clients and its band, of percentages [rounds, K]; the mean's end."""
    mean = mean_accuracies(accuracies)
    is_measured = np.isfinite(mean)
    rounds, mean, accuracies = rounds[is_measured], mean[is_measured], accuracies[is_measured]
    name, color = "mean of clients' own tests", PALETTE[0]
    panel.plot(rounds, mean, color=color, lw=1.6, label=name)
    is_tested_client = np.isfinite(accuracies).any(0)
    low, high = (
        np.percentile(accuracies[:, is_tested_client], (10, 90), axis=1) if len(mean) else ([], [])
    )
    panel.fill_between(rounds, low, high, color=color, alpha=0.15, lw=0)
    return [LineLabel(name, float(mean[-1]), color)] if len(mean) else []


def _plot_collaboration(result: Result, partition: Partition, stem: Path) -> None:
    from fedjax_het.analysis import plot_collaboration
    from fedjax_het.analysis.figures.animation import animate_collaboration

    groups = get_client_groups(partition) if "clients_per_group" in partition.parameters else None
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
    from fedjax_het.analysis.figures.animation import animate_synthesis
    from fedjax_het.analysis.figures.synthetic_images import plot_synthesis
    from fedjax_het.condensation import SyntheticData

    label_logits = artifacts["synthetic_label_logits"][artifacts["snapshot_samples"]]
    steps = zip(artifacts["snapshot_iterations"], artifacts["snapshots"], strict=True)
    snapshots = {int(n): SyntheticData(images, label_logits, jnp.float32(0)) for n, images in steps}
    names = dataset.class_names or None
    plot_synthesis(snapshots, stem.with_suffix(".png"), class_names=names)
    animate_synthesis(snapshots, stem.with_suffix(".gif"), class_names=names)


def _plot_condensed(artifacts: dict[str, np.ndarray], dataset: Dataset, path: Path) -> None:
    from fedjax_het.analysis.figures.synthetic_images import plot_condensed

    plot_condensed(
        artifacts["condensed_images"],
        artifacts["condensed_clients"],
        artifacts["condensed_classes"],
        path,
        class_names=dataset.class_names or None,
        mean=dataset.mean,
        std=dataset.std,
    )
