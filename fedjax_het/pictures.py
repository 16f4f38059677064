"""The pictures of one run, drawn from its result."""

from pathlib import Path

import numpy as np

from fedjax_het.data import Dataset, Partition, plot_partition
from fedjax_het.result import Result


def draw_run(result: Result, dataset: Dataset, partition: Partition, directory: str | Path) -> None:
    """Write `curve.png`, `partition.png` and, for a method that makes images, `synthesis.png` or
    `condensed.png`."""
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


def plot_curve(result: Result, path: str | Path) -> None:
    """Test accuracy and training loss against the round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spec = result.spec
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rounds = 1 + np.arange(spec.rounds)
    accuracy = 100 * result.metrics["test_accuracy"]
    known = np.isfinite(accuracy)
    axes.plot(rounds[known], accuracy[known], color="#0072B2", label="test accuracy")
    axes.set(xlabel="round", ylabel="test accuracy (%)", xlim=(1, max(2, spec.rounds)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    loss = axes.twinx()
    loss.plot(rounds, result.metrics["train_loss"], color="#D55E00", lw=1, label="training loss")
    condensed = "condensed_images" in result.artifacts
    kind = "loss of condensation" if condensed else "local training loss (nats)"
    loss.set(ylabel=kind, ylim=(0, None))
    lines = [*axes.lines, *loss.lines]
    axes.legend(lines, [line.get_label() for line in lines], loc="center right", frameon=False)
    split = spec.partition + (f", alpha {spec.alpha:g}" if spec.alpha is not None else "")
    axes.set_title(f"{spec.algorithm} on {spec.dataset}, {spec.model}, {split}", fontsize=10)
    figure.savefig(path, dpi=150)


def _plot_snapshots(artifacts: dict[str, np.ndarray], dataset: Dataset, path: Path) -> None:
    from fedjax_het.condensation import SyntheticData
    from fedjax_het.condensation.pictures import plot_synthesis

    logits = artifacts["synthetic_label_logits"][artifacts["snapshot_samples"]]
    steps = zip(artifacts["snapshot_iterations"], artifacts["snapshots"], strict=True)
    plot_synthesis(
        {int(n): SyntheticData(images, logits, np.float32(0)) for n, images in steps},
        path,
        class_names=dataset.class_names,
    )


def _plot_condensed(artifacts: dict[str, np.ndarray], dataset: Dataset, path: Path) -> None:
    from fedjax_het.condensation.pictures import plot_condensed

    plot_condensed(
        artifacts["condensed_images"],
        artifacts["condensed_clients"],
        artifacts["condensed_classes"],
        path,
        class_names=dataset.class_names or None,
        mean=dataset.mean,
        std=dataset.std,
    )
