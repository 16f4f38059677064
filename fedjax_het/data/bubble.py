"""The bubble plot of a partition: clients across, classes up, area for the number of examples."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_het.data.partition import Partition
from fedjax_het.errors import ConfigError

_COLOUR = "#3b6fb6"


def plot_partition(
    partition: Partition,
    labels: np.ndarray,
    num_classes: int,
    path: str | os.PathLike,
    *,
    class_names: Sequence[str] = (),
    title: str | None = None,
) -> Path:
    """Draw who holds what as in FedAF's Figures 6 to 8, and write it to `path` (.png, .pdf, .svg).

    Each bubble's area is proportional to client k's examples of class c; a key gives the scale.
    Bubbles are as large as their cells allow, so areas compare within one figure only. The figure
    grows with the clients and classes. Uses no global state of matplotlib. Returns the path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    path = Path(path)
    counts = partition.label_counts(labels, num_classes)
    num_clients = partition.num_clients
    # Cells in inches; wide federations and many classes get small cells, not huge figures.
    cell_width = float(np.clip(11.0 / num_clients, 0.14, 0.5))
    cell_height = float(np.clip(5.0 / num_classes, 0.09, 0.36))
    width, height = num_clients * cell_width, num_classes * cell_height

    left, right, bottom, top = 1.15, 0.95, 0.55, 0.45 if title else 0.15
    figure = Figure(figsize=(left + max(width, 2.5) + right, bottom + max(height, 1.2) + top))
    FigureCanvasAgg(figure)
    total_width, total_height = figure.get_size_inches()
    axes = figure.add_axes(
        [
            left / total_width,
            bottom / total_height,
            1 - (left + right) / total_width,
            1 - (bottom + top) / total_height,
        ]
    )

    # In points: the largest bubble overlaps its neighbours a little where cells are narrow.
    largest = max(int(counts.max()), 1)
    diameter = 72 * max(min(cell_width, cell_height) * 0.95, min(0.26, cell_height * 1.5))
    clients, classes = np.nonzero(counts)
    held = counts[clients, classes]
    order = np.argsort(-held, kind="stable")  # small ones on top
    axes.scatter(
        clients[order],
        classes[order],
        s=held[order] / largest * diameter**2,
        color=_COLOUR,
        alpha=0.8,
        linewidths=0,
        clip_on=False,
        zorder=3,
    )

    axes.set_xlim(-0.6, num_clients - 0.4)
    axes.set_ylim(-0.6, num_classes - 0.4)
    axes.set_xlabel("client")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    if class_names and num_classes <= 30:
        if len(class_names) != num_classes:
            raise ConfigError(
                f"class_names = {tuple(class_names)!r}: expected {num_classes} names or none"
            )
        axes.set_yticks(range(num_classes), class_names)
    else:
        axes.set_ylabel("class")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.grid(color="#e4e7ec", linewidth=0.6, zorder=0)
    axes.tick_params(length=0, labelsize=8, colors="#333f50")
    for side in axes.spines.values():
        side.set_visible(False)
    if title:
        axes.set_title(title, fontsize=10, loc="left", pad=10)

    shown = _round_counts(largest)
    handles = [
        axes.scatter([], [], s=n / largest * diameter**2, color=_COLOUR, alpha=0.8, linewidths=0)
        for n in shown
    ]
    axes.legend(
        handles,
        [f"{n:,}" for n in shown],
        title="examples",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        labelspacing=1.0,
    )
    figure.savefig(path, dpi=200)
    return path


def _round_counts(largest: int) -> list[int]:
    """Up to three round numbers that span the counts, for the key."""
    power = 10 ** int(np.floor(np.log10(largest)))
    top = max(step * power for step in (1, 2, 5) if step * power <= largest)
    return sorted({max(top // 10, 1), max(top // 3 // power * power, top // 4, 1), top})
