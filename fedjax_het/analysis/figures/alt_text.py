"""What a figure shows, in words: for those who do not see it."""

import math
from typing import TYPE_CHECKING, Any

from fedjax_het.utils.text import to_one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_PANELS, _MAX_LINES = 6, 12  # that are described one by one


def describe_figure(figure: "Figure") -> str:
    """Title, axes, and of every panel the lines with where they end, bars, images and points."""
    panels = [axes for axes in figure.axes if axes.get_visible() and _has_data(axes)]
    heading = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
    parts = [heading] if heading else []
    if len(panels) > 1:
        parts.append(f"{len(panels)} panels")
    for name in "xy":
        labels = dict.fromkeys(getattr(panel, f"get_{name}label")() for panel in panels)
        if nonempty_labels := [label for label in labels if label]:
            parts.append(f"{name}: {' or '.join(nonempty_labels[:3])}")
    labels_by_style: dict[Any, str] = {}
    for legend in [*figure.legends, *(panel.get_legend() for panel in panels)]:
        if legend is not None:
            labels_by_style |= _map_legend_labels(legend)
    parts += [_describe_panel(panel, labels_by_style) for panel in panels[:_MAX_PANELS]]
    if len(panels) > _MAX_PANELS:
        parts.append(f"and {len(panels) - _MAX_PANELS} more panels")
    return to_one_line(". ".join(part.strip().rstrip(".") for part in parts if part.strip()) + ".")


def _has_data(axes: Any) -> bool:
    return (axes.axison and bool(axes.has_data())) or bool(axes.images)


def _map_legend_labels(legend: Any) -> dict[Any, str]:
    """Labels by colour and style, as a legend beside the panels has them."""
    labels_by_style = {}
    texts = [text.get_text() for text in legend.get_texts()]
    for handle, text in zip(legend.legend_handles, texts, strict=False):
        if hasattr(handle, "get_linestyle") and hasattr(handle, "get_color"):
            labels_by_style[_line_style(handle)] = text
    return labels_by_style


def _line_style(line: Any) -> tuple[str, str]:
    return str(line.get_color()), str(line.get_linestyle())


def _describe_panel(axes: Any, labels_by_style: dict[Any, str]) -> str:
    texts = []
    for line in axes.lines:
        label = str(line.get_label())
        label = labels_by_style.get(_line_style(line), "") if label.startswith("_") else label
        y = [float(value) for value in line.get_ydata() if _is_finite(value)]
        if label and y:
            # A level line is a value of its own, as what a paper reports.
            verb = "ends at" if len(y) > 2 or y[0] != y[-1] else "marked at"
            texts.append(f"{label} {verb} {y[-1]:.4g}")
    texts = list(dict.fromkeys(texts))
    if len(texts) > _MAX_LINES:
        texts = [*texts[:_MAX_LINES], f"and {len(texts) - _MAX_LINES} more lines"]
    bars = [container for container in axes.containers if hasattr(container, "patches")]
    for bar in bars[:_MAX_LINES]:
        heights = ", ".join(f"{patch.get_height():.4g}" for patch in bar.patches[:_MAX_LINES])
        label = bar.get_label()
        texts.append(f"bars{'' if label.startswith('_') else f' of {label}'}: {heights}")
    for image in axes.images[:1]:
        shape = image.get_array().shape
        texts.append(f"an image of {shape[0]} by {shape[1]} cells")
    scatter_plots = [collection for collection in axes.collections if _is_scatter(collection)]
    points = sum(len(scatter.get_offsets()) for scatter in scatter_plots)
    if points:
        texts.append(f"{points} points")
    title = axes.get_title() or axes.get_title(loc="left")
    return ": ".join(filter(None, (title, "; ".join(texts))))


def _is_scatter(collection: Any) -> bool:
    return type(collection).__name__ == "PathCollection"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False
