"""How figures look: a method's colour, panels, legends."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.common.doors import door
from fedjax_het.common.text import figure_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

# Of rows that papers report and that are no methods here, and of methods without a colour.
_OTHER_COLOURS = ("#E08214", "#DDCC77", "#661100", "#6699CC", "#888888")
_MARKERS = "os^Dv<>pPX*h"
_LIGHTEST = 0.65  # share of white
MOST_COLUMNS = 4
Sharing = Literal["row", "all", "none"]


def method_rank(method: str) -> tuple[int, str]:
    """Sorts methods: those that this process knows in their order, then others by name."""
    known = list(METHODS)
    return (known.index(method) if method in known else len(known), method)


@door
def method_colours(methods: Iterable[str]) -> dict[str, str]:
    """A colour per method, as hexadecimal digits. Those without one of their own share a few."""
    others = itertools.cycle(_OTHER_COLOURS)
    return {
        name: (METHODS[name].colour if name in METHODS else "") or next(others)
        for name in dict.fromkeys(methods)
    }


def line_styles(lines: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each line, given as its method and its label.

    Lines of one method share its colour, each lighter than the one before.
    """
    from matplotlib.colors import to_hex, to_rgb

    variants: dict[str, list[str]] = {}
    for method, label in dict.fromkeys(lines):
        variants.setdefault(method, []).append(label)
    colours = method_colours(variants)
    styles = {}
    for number, (method, labels) in enumerate(variants.items()):
        whites = np.linspace(0, min(_LIGHTEST, 0.25 + 0.1 * len(labels)), len(labels))
        for label, white in zip(labels, whites, strict=True):
            red, green, blue = (white + (1 - white) * part for part in to_rgb(colours[method]))
            colour = to_hex((red, green, blue))
            styles[label] = {
                "color": colour.upper(),
                "linestyle": (METHODS[method].dashes if method in METHODS else None) or "-",
                "marker": _MARKERS[number % len(_MARKERS)],
            }
    return styles


def make_panels(
    titles: Sequence[str], *, columns: int, size: tuple[float, float], sharey: Sharing
) -> tuple["Figure", dict[str, "Axes"]]:
    """A figure with one panel per title, row by row, at most four beside each other.

    `size` is that of a panel in inches; `sharey` says which panels share their limits: those of a
    "row", "all" or "none".
    """
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(titles), MOST_COLUMNS))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    for unused in grid.flat[len(titles) :]:
        unused.remove()
    panels = dict(zip(titles, grid.flat, strict=False))
    for title, panel in panels.items():
        panel.set_title(figure_text(title), fontsize=10, wrap=True)
        panel.tick_params(labelsize=9)
    return figure, panels


def is_lowest(panel: "Axes", panels: Iterable["Axes"]) -> bool:
    """Whether no panel lies under this one."""
    place = _place(panel)
    return not any(
        other.colspan == place.colspan and other.rowspan.start > place.rowspan.start
        for other in map(_place, panels)
    )


def is_leftmost(panel: "Axes") -> bool:
    return _place(panel).is_first_col()


def _place(panel: "Axes") -> "SubplotSpec":
    """Where a panel of `make_panels` is in its grid."""
    place = panel.get_subplotspec()
    assert place is not None
    return place


def whole_ticks(panel: "Axes") -> None:
    """Ticks of the horizontal axis at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    locator = panel.xaxis.get_major_locator()
    assert isinstance(locator, MaxNLocator)  # a linear axis has it
    locator.set_params(integer=True)


def band_opacity(lines: int) -> float:
    """Fainter where many bands overlap."""
    return 0.18 if lines <= 6 else 0.08


def within_percent(panel: "Axes") -> None:
    """No room for accuracies below 0 or above 100."""
    low, high = panel.get_ylim()
    panel.set_ylim(max(low, 0), min(high, 100))


def empty_panel(panel: "Axes", text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", color="#666666")
    panel.set_xticks([])


def add_legend(figure: "Figure", handles: Sequence[Any]) -> None:
    """One legend under all panels, for which the figure grows."""
    if not handles:
        return
    width, height = figure.get_size_inches()
    lengths = [len(handle.get_label()) for handle in handles]

    def points(columns: int) -> float:
        """The width of the legend, at a font of 10: labels fill it column by column."""
        return sum(6 * max(own) + 50 for own in np.array_split(lengths, columns))

    most = min(len(handles), 6)
    columns = max((n for n in range(1, most + 1) if points(n) <= 72 * width), default=1)
    figure.set_size_inches(width, height + 0.1 + 0.21 * -(-len(handles) // columns))
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=10,
    )
    for text in legend.get_texts():
        text.set_text(figure_text(text.get_text()))
