"""How figures look: a method's colour, panels, legends."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Look(NamedTuple):
    """How a method's lines are drawn in every figure."""

    colour: str
    """As hexadecimal digits."""
    dashes: tuple[float, tuple[float, ...]] | None = None
    """For a method whose curves often lie on another's, which shows through the gaps: where the
    pattern starts and the lengths of its strokes and gaps, in widths of the line."""


# Okabe and Ito's colours for the first methods, Tol's muted ones for the rest: both can be kept
# apart by colour-blind readers. Of the personalised methods those that tune another's model are
# lighter than that one.
_LOOKS = {
    "fedavg": Look("#0072B2"),
    "fedprox": Look("#E69F00", (0, (4, 1.5))),
    "scaffold": Look("#009E73"),
    "dynafed": Look("#D55E00"),
    "feddf": Look("#CC79A7", (0, (6, 2))),
    "fedbe": Look("#88CCEE", (0, (2, 1.5))),
    "abavg": Look("#332288"),
    "fedgen": Look("#999933"),
    "fedmix": Look("#882255"),
    "naivemix": Look("#CB6F97", (0, (4, 1.5))),
    "fedbn": Look("#56B4E9", (0, (1.5, 1))),
    "moon": Look("#AA4499"),
    "feddyn": Look("#117733"),
    "feddc": Look("#66C2A5"),
    "fednova": Look("#A6761D"),
    "fedavgm": Look("#3F51B5"),
    "fedadam": Look("#B15928"),
    "fedyogi": Look("#FB9A99"),
    "feddm": Look("#000000"),
    "fedaf": Look("#CC3311"),
    "separate": Look("#777777"),
    "fedavg_ft": Look("#6BAED6"),
    "fedprox_ft": Look("#F5C26B", (0, (4, 1.5))),
    "apfl": Look("#7B3294"),
    "fedamp": Look("#B2182B"),
    "heurfedamp": Look("#E7298A", (0, (4, 1.5))),
    "ditto": Look("#5B8C1A"),
    "pfedme": Look("#8C6D31"),
    "per_fedavg": Look("#17BECF"),
    "data_sharing": Look("#E6AB02"),
    "fsl": Look("#C51B7D"),
    "fsl_p": Look("#762A83"),
    "fslsyn": Look("#E08214"),
}
_OTHER_COLOURS = ("#DDCC77", "#661100", "#6699CC", "#888888")
_MARKERS = "os^Dv<>pPX*h"
_LIGHTEST = 0.65  # share of white
MOST_COLUMNS = 4


def method_looks() -> dict[str, Look]:
    """The looks of the methods that have one, in the order in which methods are listed."""
    return _LOOKS


def method_rank(method: str) -> tuple[int, str]:
    """Sorts methods: those with a look of their own in its order, then by name."""
    known = list(method_looks())
    return (known.index(method) if method in known else len(known), method)


def method_colours(methods: Iterable[str]) -> dict[str, str]:
    """A colour per method, as hexadecimal digits. Those without one of their own share four."""
    looks = method_looks()
    others = itertools.cycle(_OTHER_COLOURS)
    return {
        name: looks[name].colour if name in looks else next(others)
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
    looks, colours = method_looks(), method_colours(variants)
    styles = {}
    for number, (method, labels) in enumerate(variants.items()):
        whites = np.linspace(0, min(_LIGHTEST, 0.25 + 0.1 * len(labels)), len(labels))
        for label, white in zip(labels, whites, strict=True):
            colour = to_hex((1 - white) * np.array(to_rgb(colours[method])) + white)
            styles[label] = {
                "color": colour.upper(),
                "linestyle": (looks[method].dashes if method in looks else None) or "-",
                "marker": _MARKERS[number % len(_MARKERS)],
            }
    return styles


def make_panels(
    titles: Sequence[str], *, columns: int, size: tuple[float, float], sharey: str
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
        panel.set_title(title, fontsize=10, wrap=True)
        panel.tick_params(labelsize=9)
    return figure, panels


def is_lowest(panel: "Axes", panels: Iterable["Axes"]) -> bool:
    """Whether no panel lies under this one."""
    place = panel.get_subplotspec()
    return not any(
        other.get_subplotspec().colspan == place.colspan
        and other.get_subplotspec().rowspan.start > place.rowspan.start
        for other in panels
    )


def is_leftmost(panel: "Axes") -> bool:
    return panel.get_subplotspec().is_first_col()


def plain_axes(panel: "Axes") -> None:
    """A light grid, and no frame where there is no axis."""
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


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
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=10,
    )
