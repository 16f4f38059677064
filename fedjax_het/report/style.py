"""How figures look: a method's colour, panels, legends."""

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.common.doors import door
from fedjax_het.common.text import figure_text, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

# Told apart with any of the common colour-blindnesses: Okabe and Ito's, their yellow, which white
# paper swallows, replaced by Tol's wine.
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#882255",
    "#56B4E9",
    "#000000",
)
# Beyond as many, where names stand beside what is drawn.
_MORE = ("#E08214", "#DDCC77", "#661100", "#6699CC", "#888888")
GREYS = ("#5F5F5F", "#8C8C8C", "#B4B4B4")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # of variants, as matplotlib has them
_MARKERS = "os^Dv<>pPX*h"
_DARKEST, _LIGHTEST = 0.35, 0.55  # share of black, of white, of a method's many variants
_LETTERS = 16  # of a note, in an inch
MOST_COLUMNS = 4
Sharing = Literal["row", "all", "none"]


def method_rank(method: str) -> tuple[int, str]:
    """Sorts methods: those that this process knows in their order, then others by name."""
    known = list(METHODS)
    return (known.index(method) if method in known else len(known), method)


@door
def method_colours(methods: Iterable[str]) -> dict[str, str]:
    """A colour per method, as hexadecimal digits, no two alike.

    Up to eight have colours of `PALETTE`: their own where it is one of them and free, else the
    next that none of them has. More have their own, and those without one a few of their own.
    """
    return distinct_colours((name, name) for name in methods)


def distinct_colours(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The same by label, of lines given as their method and their label: the first of a method has
    the method's."""
    named = {label: method for method, label in lines}
    own = {label: METHODS[m].colour.upper() if m in METHODS else "" for label, m in named.items()}
    if len(named) > len(PALETTE):
        others = itertools.cycle(_MORE)
        return {label: own[label] or next(others) for label in named}
    free = [colour for colour in PALETTE if colour not in own.values()]
    colours: dict[str, str] = {}
    for label in named:
        fits = own[label] in PALETTE and own[label] not in colours.values()
        colours[label] = own[label] if fits else free.pop(0)
    return colours


def line_styles(lines: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each line, given as its method and its label.

    Lines of one method share its hue: the first of up to three has its colour, the others are
    lighter, and dashed; more go from dark to light.
    """
    from matplotlib.colors import to_hex, to_rgb

    variants: dict[str, list[str]] = {}
    for method, label in dict.fromkeys(lines):
        variants.setdefault(method, []).append(label)
    colours = method_colours(variants)
    styles = {}
    for number, (method, labels) in enumerate(variants.items()):
        few = len(labels) <= len(_DASHES)
        whites = (0, 0.2, 0.35) if few else np.linspace(-_DARKEST, _LIGHTEST, len(labels))
        dashes = (METHODS[method].dashes if method in METHODS else None) or "-"
        for place, (label, white) in enumerate(zip(labels, whites, strict=False)):
            rgb = (1 - abs(white)) * np.array(to_rgb(colours[method])) + max(white, 0.0)
            styles[label] = {
                "color": to_hex(tuple(rgb)).upper(),
                "linestyle": _DASHES[place] if few and place else dashes,
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


def within_percent(panel: "Axes") -> None:
    """No room for accuracies below 0 or above 100."""
    low, high = panel.get_ylim()
    panel.set_ylim(max(low, 0), min(high, 100))


def empty_panel(panel: "Axes", text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", color="#666666")
    panel.set_xticks([])
    if not any(other.lines or other.collections for other in panel.figure.axes):
        panel.set_yticks([])


def add_note(figure: "Figure", text: str, *, above: str = "") -> None:
    """A line under all panels, as many lines of it as the figure's width asks for; the figure grows
    for them. `above`: what the horizontal axes of all panels are."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(one_line(text), max(30, int(width * _LETTERS)))
    lines = [*filter(None, [above]), *lines]
    if lines:
        figure.set_size_inches(width, height + 0.05 + 0.15 * len(lines))
        figure.supxlabel(figure_text("\n".join(lines)), fontsize=8, color="#444444")


def readable(colour: str) -> str:
    """The colour, as dark as letters on white have to be (a contrast of 3)."""
    from matplotlib.colors import to_hex, to_rgb

    rgb = np.array(to_rgb(colour))
    while _luminance(rgb) > 0.3:
        rgb = 0.95 * rgb
    return to_hex(tuple(rgb)).upper()


def _luminance(rgb: np.ndarray) -> float:
    """Relative, of sRGB (WCAG 2)."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


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
