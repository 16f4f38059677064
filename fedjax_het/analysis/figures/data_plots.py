"""Plot of a partition: clients are columns, classes are rows, areas are numbers of examples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.analysis.figures.style import PALETTE, style_axes, wrap_title
from fedjax_het.data.partition import Partition
from fedjax_het.data.validation import NumClasses
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.fonts import choose_fonts
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BUBBLE_STYLE: dict[str, Any] = {"facecolor": PALETTE[0], "edgecolor": "white", "zorder": 3}


@validate_arguments
def plot_partition(
    partition: Partition,
    labels: np.ndarray,
    num_classes: NumClasses,
    *,
    class_names: Sequence[str] = (),
    title: str | None = None,
) -> "Figure":
    """Plot a partition as in FedAF's Figures 6 to 8.

    The area of a bubble is proportional to the number of examples of class c at client k; a key
    gives the scale. Areas compare within one figure only, since bubbles are as large as their
    cells allow. The figure grows with the numbers of clients and classes.

    Args:
      partition: the partition.
      labels: labels of all training examples, int `[N]`.
      num_classes: number of classes, C.
      class_names: names of the classes on the axis; default, and for more than 30 classes: their
        numbers.
      title: title of the figure.

    Returns:
      The figure.

    Raises:
      ConfigError: if the number of class names does not fit.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import make_partition
      >>> from fedjax_het.analysis import plot_partition
      >>> labels = np.arange(60) % 3
      >>> partition = make_partition("iid", labels, 3, num_clients=2, seed=0)
      >>> plot_partition(partition, labels, 3).axes[0].get_xlabel()
      'Client'
    """
    from matplotlib.figure import Figure

    counts = partition.label_counts(labels, num_classes)
    expected = f"{num_classes} names"
    require(len(class_names) in (0, num_classes), "class_names", class_names, expected)
    # Cell sizes in inches; wide federations and many classes get small cells, not huge figures.
    sizes = np.array([partition.num_clients, num_classes])
    cell = np.clip(np.array([11.0, 5.0]) / sizes, (0.14, 0.09), (0.5, 0.36))
    # Points. If cells are narrow, the largest bubbles overlap their neighbors a little.
    max_count = max(int(counts.max()), 1)
    diameter = 72 * max(cell.min() * 0.95, min(0.24, cell[1] * 1.5))
    margin = np.maximum(0.6, 0.6 * diameter / 72 / cell)  # in cells, the units of the axes
    width, height = np.maximum((sizes - 1 + 2 * margin) * cell, (2.5, 1.2))
    has_class_labels = bool(class_names) and num_classes <= 30
    left, right = 0.65, 1.05
    if has_class_labels:
        left = max(1.1, 0.55 + 0.065 * max(map(len, class_names)))
    title_text = wrap_title(title, width + right) if title else ""
    bottom, top = 0.55, 0.45 + 0.17 * title_text.count("\n") if title else 0.15
    figure = Figure(figsize=(left + width + right, bottom + height + top))
    full_width, full_height = figure.get_size_inches()
    axes = figure.subplots()
    sides = left / full_width, bottom / full_height, 1 - right / full_width, 1 - top / full_height
    figure.subplots_adjust(*sides)

    def draw_bubbles(x, y, bubble_counts):
        area = bubble_counts / max_count * diameter**2
        # A thin white rim separates overlapping bubbles; it would hide the smallest ones.
        return axes.scatter(x, y, s=area, linewidth=np.where(area > 16, 0.4, 0.0), **_BUBBLE_STYLE)

    clients, classes = np.nonzero(counts)
    order = np.argsort(-counts[clients, classes], kind="stable")  # small bubbles are on top
    clients, classes = clients[order], classes[order]
    draw_bubbles(clients, classes, counts[clients, classes])
    axes.set_xlim(-margin[0], sizes[0] - 1 + margin[0])
    axes.set_ylim(-margin[1], sizes[1] - 1 + margin[1])
    _label_axes(axes, num_classes, class_names if has_class_labels else ())
    if title:
        axes.set_title(title_text, fontsize=10, loc="left", pad=10)

    legend_counts = _choose_legend_counts(max_count)
    # matplotlib takes these distances in units of the font size.
    handle_size = diameter * np.sqrt(legend_counts[-1] / max_count) / 8
    axes.legend(
        [draw_bubbles([], [], np.array([n])) for n in legend_counts],
        [f"{n:,}" for n in legend_counts],
        title="Examples",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        labelspacing=max(0.6, 0.75 * handle_size - 0.6),
        handlelength=max(1.5, handle_size),
    )
    return choose_fonts(figure)


def _label_axes(axes: Any, num_classes: int, class_names: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("Client", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    axes.set_ylabel("Class" if num_classes > 1 else "", fontsize=9)
    if num_classes == 1:  # of a task without classes
        axes.set_yticks([])
    elif class_names:
        axes.set_yticks(range(len(class_names)), map(escape_mathtext, class_names))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    style_axes(axes)
    axes.tick_params(labelsize=9)


def _choose_legend_counts(max_count: int) -> list[int]:
    """Return up to three round numbers within the counts, for the key."""
    power = 10 ** int(np.floor(np.log10(max_count)))
    largest = max(step * power for step in (1, 2, 5) if step * power <= max_count)
    return sorted({max(largest // 10, 1), max(largest // 2, 1), largest})
