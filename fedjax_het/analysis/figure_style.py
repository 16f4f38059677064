"""How figures look: a method's colour, panels, legends."""

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.text import escape_mathtext, to_one_line

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
_EXTRA_COLORS = ("#E08214", "#DDCC77", "#661100", "#6699CC", "#888888")
GRAYS = ("#5F5F5F", "#8C8C8C", "#B4B4B4")
_VARIANT_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # of variants, as matplotlib has them
_MARKERS = "os^Dv<>pPX*h"
_MAX_DARKENING, _MAX_LIGHTENING = (
    0.35,
    0.55,
)  # share of black, of white, of a method's many variants
_CHARACTERS_PER_INCH = 16  # of a note, in an inch
MAX_COLUMNS = 4
AxisSharing = Literal["row", "all", "none"]


def make_method_sort_key(method: str) -> tuple[int, str]:
    """Sorts methods: those that this process knows in their order, then others by name."""
    registered_methods = list(METHODS)
    return (
        registered_methods.index(method)
        if method in registered_methods
        else len(registered_methods),
        method,
    )


@validate_arguments
def assign_method_colors(methods: Iterable[str]) -> dict[str, str]:
    """Assign each method a color; up to eight methods have different colors.

    Up to eight methods have colors of `PALETTE`: a method's own color if it is in the palette and
    free, otherwise the next one that no method claims. With more methods, each method has its own
    color, and methods without one share a few further colors.

    Args:
      methods: names of methods.

    Returns:
      Hexadecimal colors by method.
    """
    return assign_distinct_colors((name, name) for name in methods)


def assign_distinct_colors(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The same by label, of lines given as their method and their label: the first of a method has
    the method's."""
    method_by_label = {label: method for method, label in lines}
    preferred_colors = {
        label: METHODS[m].color.upper() if m in METHODS else ""
        for label, m in method_by_label.items()
    }
    if len(method_by_label) > len(PALETTE):
        extra_colors = itertools.cycle(_EXTRA_COLORS)
        return {label: preferred_colors[label] or next(extra_colors) for label in method_by_label}
    free_colors = [colour for colour in PALETTE if colour not in preferred_colors.values()]
    colors: dict[str, str] = {}
    for label in method_by_label:
        is_available = (
            preferred_colors[label] in PALETTE and preferred_colors[label] not in colors.values()
        )
        colors[label] = preferred_colors[label] if is_available else free_colors.pop(0)
    return colors


def make_line_styles(lines: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each line, given as its method and its label.

    Lines of one method share its hue: the first of up to three has its colour, the others are
    lighter, and dashed; more go from dark to light.
    """
    from matplotlib.colors import to_hex, to_rgb

    variants: dict[str, list[str]] = {}
    for method, label in dict.fromkeys(lines):
        variants.setdefault(method, []).append(label)
    colors = assign_method_colors(variants)
    styles = {}
    for method_index, (method, labels) in enumerate(variants.items()):
        has_few_variants = len(labels) <= len(_VARIANT_DASHES)
        lightness_shifts = (
            (0, 0.2, 0.35)
            if has_few_variants
            else np.linspace(-_MAX_DARKENING, _MAX_LIGHTENING, len(labels))
        )
        dashes = (METHODS[method].dashes if method in METHODS else None) or "-"
        for variant_index, (label, shift) in enumerate(zip(labels, lightness_shifts, strict=False)):
            rgb = (1 - abs(shift)) * np.array(to_rgb(colors[method])) + max(shift, 0.0)
            styles[label] = {
                "color": to_hex(tuple(rgb)).upper(),
                "linestyle": _VARIANT_DASHES[variant_index]
                if has_few_variants and variant_index
                else dashes,
                "marker": _MARKERS[method_index % len(_MARKERS)],
            }
    return styles


def make_panels(
    titles: Sequence[str], *, columns: int, size: tuple[float, float], sharey: AxisSharing
) -> tuple["Figure", dict[str, "Axes"]]:
    """A figure with one panel per title, row by row, at most four beside each other.

    `size` is that of a panel in inches; `sharey` says which panels share their limits: those of a
    "row", "all" or "none".
    """
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(titles), MAX_COLUMNS))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    for unused_panel in grid.flat[len(titles) :]:
        unused_panel.remove()
    panels = dict(zip(titles, grid.flat, strict=False))
    for title, panel in panels.items():
        panel.set_title(escape_mathtext(title), fontsize=10, wrap=True)
        panel.tick_params(labelsize=9)
    return figure, panels


def is_bottom_panel(panel: "Axes", panels: Iterable["Axes"]) -> bool:
    """Whether no panel lies under this one."""
    position = _get_grid_position(panel)
    return not any(
        other_position.colspan == position.colspan
        and other_position.rowspan.start > position.rowspan.start
        for other_position in map(_get_grid_position, panels)
    )


def is_leftmost_panel(panel: "Axes") -> bool:
    return _get_grid_position(panel).is_first_col()


def _get_grid_position(panel: "Axes") -> "SubplotSpec":
    """Where a panel of `make_panels` is in its grid."""
    position = panel.get_subplotspec()
    assert position is not None
    return position


def set_integer_ticks(panel: "Axes") -> None:
    """Ticks of the horizontal axis at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    locator = panel.xaxis.get_major_locator()
    assert isinstance(locator, MaxNLocator)  # a linear axis has it
    locator.set_params(integer=True)


def clip_percent_limits(panel: "Axes") -> None:
    """No room for accuracies below 0 or above 100."""
    low, high = panel.get_ylim()
    panel.set_ylim(max(low, 0), min(high, 100))


def mark_empty_panel(panel: "Axes", text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", color="#666666")
    panel.set_xticks([])
    if not any(other_panel.lines or other_panel.collections for other_panel in panel.figure.axes):
        panel.set_yticks([])


def add_note(figure: "Figure", text: str, *, x_label: str = "") -> None:
    """A line under all panels, as many lines of it as the figure's width asks for; the figure grows
    for them. `above`: what the horizontal axes of all panels are."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(to_one_line(text), max(30, int(width * _CHARACTERS_PER_INCH)))
    lines = [*filter(None, [x_label]), *lines]
    if lines:
        figure.set_size_inches(width, height + 0.05 + 0.15 * len(lines))
        figure.supxlabel(escape_mathtext("\n".join(lines)), fontsize=8, color="#444444")


def darken_for_text(color: str) -> str:
    """The colour, as dark as letters on white have to be (a contrast of 3)."""
    from matplotlib.colors import to_hex, to_rgb

    rgb = np.array(to_rgb(color))
    while _compute_relative_luminance(rgb) > 0.3:
        rgb = 0.95 * rgb
    return to_hex(tuple(rgb)).upper()


def _compute_relative_luminance(rgb: np.ndarray) -> float:
    """Relative, of sRGB (WCAG 2)."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def add_legend(figure: "Figure", handles: Sequence[Any]) -> None:
    """One legend under all panels, for which the figure grows."""
    if not handles:
        return
    width, height = figure.get_size_inches()
    lengths = [len(handle.get_label()) for handle in handles]

    def compute_legend_width(columns: int) -> float:
        """The width of the legend, at a font of 10: labels fill it column by column."""
        return sum(
            6 * max(column_lengths) + 50 for column_lengths in np.array_split(lengths, columns)
        )

    max_columns = min(len(handles), 6)
    columns = max(
        (n for n in range(1, max_columns + 1) if compute_legend_width(n) <= 72 * width), default=1
    )
    figure.set_size_inches(width, height + 0.1 + 0.21 * -(-len(handles) // columns))
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=10,
    )
    for text in legend.get_texts():
        text.set_text(escape_mathtext(text.get_text()))
