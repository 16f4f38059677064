"""Figures of one run, drawn from its result."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fedjax_het.analysis.figures.collaboration import animate_collaboration, plot_collaboration
from fedjax_het.analysis.figures.data_plots import plot_partition
from fedjax_het.analysis.figures.direct_labels import LineLabel, label_line_ends
from fedjax_het.analysis.figures.style import (
    GRAYS,
    PALETTE,
    FigureFormat,
    add_note,
    set_integer_ticks,
    style_axes,
    wrap_title,
    write_figure,
)
from fedjax_het.analysis.figures.synthetic_images import (
    animate_synthesis,
    plot_condensed,
    plot_synthesis,
)
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.condensation import SyntheticData
from fedjax_het.data import Dataset, Partition, get_client_groups
from fedjax_het.metrics.personal import mean_accuracies
from fedjax_het.runtime.result_display import mark_isolated_points, name_data
from fedjax_het.runtime.results import Result
from fedjax_het.tasks.wording import name_score


def write_run_figures(
    result: Result,
    dataset: Dataset,
    partition: Partition,
    directory: str | Path,
    *,
    formats: Sequence[FigureFormat] = (),
) -> None:
    """Write the figures of a run.

    The names begin with the digest of the result, `<digest>.curve.png`, so that runs share a
    folder. All runs have `curve.png` and `partition.png`. Methods with the arrays have
    `synthesis.png` and `synthesis.gif`, `condensed.png`, or `collaboration.png`.
    `collaboration.gif` requires recorded rounds (option `history`).

    Args:
      result: result of the run.
      dataset: its data set.
      partition: its partition.
      directory: folder of the files.
      formats: formats of further files of each figure.
    """
    stem = f"{Path(directory).expanduser() / result.file_stem}"
    artifacts, class_names = result.artifacts, dataset.class_names or None
    labels, num_classes = dataset.train_classes, dataset.num_classes
    figures = {
        "curve": plot_run_curve(result),
        "partition": plot_partition(
            partition, labels, num_classes, class_names=dataset.class_names
        ),
    }
    if "snapshots" in artifacts and result.summary.get("synthesis_iterations") != 0:
        snapshots = get_snapshots(result)
        figures["synthesis"] = plot_synthesis(snapshots, class_names=class_names)
        animate_synthesis(snapshots, Path(f"{stem}.synthesis.gif"), class_names=class_names)
    if len(artifacts.get("condensed_images", ())):
        figures["condensed"] = plot_condensed(
            *(artifacts[f"condensed_{name}"] for name in ("images", "clients", "classes")),
            class_names=class_names,
            mean=dataset.mean,
            std=dataset.std,
        )
    if "collaboration" in artifacts:
        has_groups = "clients_per_group" in partition.parameters
        groups = get_client_groups(partition) if has_groups else None
        title, rounds = _name_method_and_data(result), result.summary["rounds"]
        titles = [f"{title}, round {rounds}"]
        figures["collaboration"] = plot_collaboration(artifacts["collaboration"], groups, titles)
        if "collaboration" in result.metrics:
            weights = result.metrics["collaboration"][:rounds]
            animate_collaboration(weights, Path(f"{stem}.collaboration.gif"), groups, title=title)
    for name, figure in figures.items():
        write_figure(Path(f"{stem}.{name}.png"), figure, formats=formats)


def _name_method_and_data(result: Result) -> str:
    dataset = name_data(result.spec, result.summary)["dataset"]
    return f"{get_method_title(result.spec.algorithm)} on {dataset}"


def get_snapshots(result: Result) -> dict[int, SyntheticData]:
    """Return the recorded snapshots of DynaFed's synthetic data by iteration."""
    artifacts = result.artifacts
    logits = artifacts["synthetic_label_logits"][artifacts["snapshot_samples"]]
    steps = zip(artifacts["snapshot_iterations"], artifacts["snapshots"], strict=True)
    return {int(n): SyntheticData(images, logits, jnp.float32(0)) for n, images in steps}


_VALIDATION_LABELS = {
    "validation_accuracy": "all validation examples",
    "mean_client_validation_accuracy": "mean of clients' validation examples",
}


def plot_run_curve(result: Result):
    """Plot test accuracy against the round, and below it the training loss.

    If clients have own tests, the accuracy is their mean, with a band from the 10th to the 90th
    percentile of the clients. The accuracy of the global model on all test examples is beside it.
    Accuracies on validation examples are dashed.

    Args:
      result: result of the run.
    """
    from matplotlib.figure import Figure

    spec = result.spec.resolved()
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    accuracy_panel, loss_panel = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    rounds = 1 + np.arange(spec.rounds)
    labels = []
    has_client_tests = "client_accuracy" in result.metrics
    if has_client_tests:
        client_accuracies = 100 * result.metrics["client_accuracy"]
        labels += _draw_client_band(accuracy_panel, rounds, client_accuracies)
    accuracy = 100 * result.metrics["test_accuracy"]
    is_measured = np.isfinite(accuracy)
    if is_measured.any() or not labels:
        name = "global model, all test examples"
        color = GRAYS[0] if labels else PALETTE[0]
        (line,) = accuracy_panel.plot(
            rounds[is_measured], accuracy[is_measured], label=name, color=color, lw=1.6
        )
        line.set_marker("o" if is_measured.sum() == 1 else "")
        if is_measured.any():
            labels.append(LineLabel(name, accuracy[is_measured][-1], color))
    validation_curves = [name for name in _VALIDATION_LABELS if name in result.metrics]
    for metric, color in zip(validation_curves, PALETTE[2:], strict=False):
        accuracy, name = 100 * result.metrics[metric], _VALIDATION_LABELS[metric]
        is_measured = np.isfinite(accuracy)
        values = accuracy[is_measured]
        accuracy_panel.plot(rounds[is_measured], values, "--", label=name, color=color, lw=1.2)
        labels += [LineLabel(name, values[-1], color)] if len(values) else []
    train_loss = result.metrics["train_loss"]
    (line,) = loss_panel.plot(rounds, train_loss, color=PALETTE[1], lw=1.2, label="training loss")
    mark_isolated_points(line)
    for panel in (accuracy_panel, loss_panel):
        style_axes(panel)
    accuracy_label = "Accuracy (%)" if validation_curves else "Test accuracy (%)"
    tasks = [result.summary.get("task")]
    accuracy_panel.set(ylabel=name_score(accuracy_label, tasks), xlim=(1, max(2, spec.rounds)))
    set_integer_ticks(accuracy_panel)
    has_images = "condensed_images" in result.artifacts
    loss_label = "Loss of condensation" if has_images else "Training loss (nats)"
    loss_panel.set(xlabel="Round", ylabel=name_score(loss_label, tasks), ylim=(0, None))
    alpha = f", alpha {spec.alpha:g}" if spec.alpha is not None else ""
    end = f"; diverged in round {result.summary['rounds']}" if result.summary["diverged"] else ""
    partition = name_data(spec, result.summary)["partition"]
    title = (
        f"{_name_method_and_data(result)}, {spec.model}, {partition}{alpha}, "
        f"protocol {spec.protocol}{end}"
    )
    accuracy_panel.set_title(wrap_title(title, 4.8), fontsize=10)
    label_line_ends(figure, {accuracy_panel: labels})
    note = "band: from the 10th to the 90th percentile of clients"
    add_note(figure, note if has_client_tests else "")
    return figure


def _draw_client_band(panel, rounds: np.ndarray, accuracies: np.ndarray) -> list[LineLabel]:
    """Draw the mean over clients of percentages `[rounds, K]` with its band; return its label."""
    mean = mean_accuracies(accuracies)
    is_measured = np.isfinite(mean)
    rounds, mean, accuracies = rounds[is_measured], mean[is_measured], accuracies[is_measured]
    name, color = "mean of clients' own tests", PALETTE[0]
    panel.plot(rounds, mean, color=color, lw=1.6, label=name)
    if not len(mean):
        return []
    is_tested_client = np.isfinite(accuracies).any(0)
    low, high = np.percentile(accuracies[:, is_tested_client], (10, 90), axis=1)
    panel.fill_between(rounds, low, high, color=color, alpha=0.15, lw=0)
    return [LineLabel(name, float(mean[-1]), color)]
