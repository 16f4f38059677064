"""Appearance of figures: colors, line styles, panels, axes, notes and legends; and their files."""

import contextlib
import io
import itertools
import os
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.fonts import choose_fonts, replace_missing_characters
from fedjax_het.utils.io import write_atomically
from fedjax_het.utils.text import escape_mathtext, to_one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

# The palette is distinguishable with the common color blindnesses. It is the palette of Okabe and
# Ito with Tol's wine instead of their yellow, which is invisible on white paper.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#882255", "#56B4E9", "#000000")
# For more lines than the palette has colors, if their names stand beside them.
_EXTRA_COLORS = ("#E08214", "#DDCC77", "#661100", "#6699CC", "#888888")
GRAYS = ("#5F5F5F", "#8C8C8C", "#B4B4B4")
BACKGROUND_COLOR = "#D0D0D0"  # of the other lines in a small panel
_VARIANT_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # line styles of matplotlib
_MARKERS = "os^Dv<>pPX*h"
_MAX_DARKENING, _MAX_LIGHTENING = 0.35, 0.55  # share of black and white in a method's variants
_CHARACTERS_PER_INCH = 16  # of a note
_CHARACTER_WIDTH = 0.6  # mean width of a character, in font sizes
_MARGIN_INCHES = 0.04  # around texts that reach beyond a figure
MAX_COLUMNS = 4
_AXIS_INCHES, _TITLE_INCHES = 0.6, 0.17  # width beside a panel's axes, height of a line of a title
_MAX_FRAME_SECONDS, _LAST_FRAME_SECONDS, _MAX_SECONDS = 0.6, 2.0, 8.0  # of an animation
AxisSharing = Literal["row", "all", "none"]
FigureFormat = Literal["pdf", "svg"]


# Files


def write_figure(
    path: str | os.PathLike,
    figure: "Figure",
    *,
    dpi: int = 150,
    formats: Sequence[FigureFormat] = (),
) -> Path:
    """Write a figure to a file, and beside it in further formats.

    A file is replaced in one step. The file is larger than the figure if texts reach beyond it, so
    that no text is cut. Texts have fonts with all of their characters, as far as they are
    installed.

    Args:
      path: file to write; its suffix determines the format (default: PNG).
      figure: the figure.
      dpi: resolution of a PNG.
      formats: formats of further files with the same stem.

    Returns:
      The path.

    Raises:
      ConfigError: if matplotlib cannot write the format of `path`.
      OSError: if a file cannot be written.

    Example:
      >>> import tempfile, pathlib
      >>> from matplotlib.figure import Figure
      >>> from fedjax_het.analysis.figures.style import write_figure
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> write_figure(folder / "empty.png", Figure(), formats=["svg"]).name
      'empty.png'
      >>> sorted(path.name for path in folder.iterdir())
      ['empty.png', 'empty.svg']
    """
    path = Path(path).expanduser()
    path = path if path.suffix else path.with_suffix(".png")
    supported = figure.canvas.get_supported_filetypes()
    expected = f"a suffix of these formats: {', '.join(sorted(supported))}"
    require(path.suffix[1:].lower() in supported, "path", str(path), expected)
    box = compute_whole_box(figure)
    for file_path in dict.fromkeys([path, *(path.with_suffix(f".{name}") for name in formats)]):
        suffix = file_path.suffix[1:].lower()
        metadata = {"Description": describe_figure(figure)} if suffix == "png" else None
        save = partial(figure.savefig, format=suffix, dpi=dpi, bbox_inches=box, metadata=metadata)
        with ignore_missing_glyphs():
            write_atomically(file_path, save)
    return path


def describe_figure(figure: "Figure") -> str:
    """Describe the axes and the note of a figure in a sentence; empty if its axes have no labels.

    Args:
      figure: the figure.

    Returns:
      For example `Test accuracy (%) against Round; band: one standard deviation over seeds.`
    """
    note = figure.get_supxlabel()
    first_line, _, other_lines = note.partition("\n")
    x_labels = [*(panel.get_xlabel().partition("\n")[0] for panel in figure.axes), first_line]
    y_labels = [figure.get_supylabel(), *(panel.get_ylabel() for panel in figure.axes)]
    x_label, y_label = (next(filter(None, labels), "") for labels in (x_labels, y_labels))
    if not y_label or not x_label:
        return ""
    if first_line == x_label:
        note = other_lines
    text = f"{y_label} against {x_label[0].lower()}{x_label[1:]}" + (f"; {note}" if note else "")
    return f"{to_one_line(text)}."


def compute_whole_box(figure: "Figure") -> "Bbox | None":
    """Return the box of a figure and of texts that reach beyond it, in inches.

    Args:
      figure: the figure, whose texts get fonts with their characters.

    Returns:
      The box; None if nothing reaches beyond the figure.
    """
    from matplotlib.transforms import Bbox

    choose_fonts(figure)
    with ignore_missing_glyphs():
        figure.draw_without_rendering()
        tight = figure.get_tightbbox()
    whole = Bbox.union([figure.bbox_inches, tight])
    excess = np.abs(whole.get_points() - figure.bbox_inches.get_points()).max()
    return whole.padded(_MARGIN_INCHES) if excess > 1e-3 else None


def wrap_title(text: str, inches: float, *, size: float = 10) -> str:
    """Wrap a title to a width; words that are longer are broken.

    Args:
      text: the title; line breaks stay.
      inches: width of the lines.
      size: font size in points.

    Returns:
      The lines, for matplotlib.
    """
    width = max(12, int(72 * inches / (_CHARACTER_WIDTH * size)))
    parts = replace_missing_characters(text).split("\n")
    lines = [line for part in parts for line in textwrap.wrap(part, width) or [""]]
    return escape_mathtext("\n".join(lines))


@contextlib.contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Return a context in which matplotlib does not warn of characters that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from", category=UserWarning)
        yield


def write_animation(
    path: str | os.PathLike, frames: Sequence[Any], draw_frame: "Callable[[Any], Figure]"
) -> Path:
    """Write a GIF that repeats, with one picture per frame.

    A picture stays for at most 0.6 s, the last one for 2 s. The file is replaced in one step.

    Args:
      path: file to write.
      frames: arguments of `draw_frame`.
      draw_frame: function that draws a frame; all figures must have one size.

    Returns:
      The path.

    Raises:
      ConfigError: if there is no frame.

    Example:
      >>> import tempfile
      >>> from matplotlib.figure import Figure
      >>> from fedjax_het.analysis.figures.style import write_animation
      >>> draw = lambda frame: Figure(figsize=(1, 1))
      >>> write_animation(f"{tempfile.mkdtemp()}/two.gif", [1, 2], draw).name
      'two.gif'
    """
    from PIL import Image

    require(len(frames) > 0, "frames", frames, "at least one")
    pictures = []
    figures = [choose_fonts(draw_frame(frame)) for frame in frames]
    box = compute_whole_box(figures[-1])
    for figure in figures:
        buffer = io.BytesIO()
        with ignore_missing_glyphs():
            figure.savefig(buffer, format="png", dpi=90, bbox_inches=box)
        picture = Image.open(buffer).convert("RGB")
        pictures.append(picture.quantize(128, dither=Image.Dither.NONE))
    seconds = min(_MAX_FRAME_SECONDS, _MAX_SECONDS / len(frames))
    durations = [int(1000 * s) for s in [seconds] * (len(frames) - 1) + [_LAST_FRAME_SECONDS]]
    path = Path(path).expanduser()
    options: dict[str, Any] = {"append_images": pictures[1:], "duration": durations, "loop": 0}
    write_atomically(
        path, lambda file: pictures[0].save(file, format="GIF", save_all=True, **options)
    )
    return path


# Colors and line styles


@validate_arguments
def assign_method_colors(methods: Iterable[str]) -> dict[str, str]:
    """Assign each method a color; up to eight methods have different colors.

    Up to eight methods have colors of `PALETTE`. A method has its own color if it is in the palette
    and free, otherwise the next color that no method claims. With more methods, each method has its
    own color, and methods without one share a few further colors.

    Args:
      methods: names of methods.

    Returns:
      Hexadecimal colors by method.

    Example:
      >>> from fedjax_het.analysis import assign_method_colors
      >>> assign_method_colors(["my_method", "fedavg"])["my_method"]
      '#D55E00'
    """
    return assign_distinct_colors((name, name) for name in methods)


def assign_distinct_colors(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Assign each line a color as `assign_method_colors` does for methods.

    Args:
      lines: method and label of each line; the first line of a method has the method's color.

    Returns:
      Hexadecimal colors by label.
    """
    methods = {label: method for method, label in lines}
    own = {n: METHODS[m].color.upper() if m in METHODS else "" for n, m in methods.items()}
    if len(methods) > len(PALETTE):
        extra_colors = itertools.cycle(_EXTRA_COLORS)
        return {label: own[label] or next(extra_colors) for label in methods}
    free = [color for color in PALETTE if color not in own.values()]
    colors: dict[str, str] = {}
    for label, color in own.items():
        is_available = color in PALETTE and color not in colors.values()
        colors[label] = color if is_available else free.pop(0)
    return colors


def make_line_styles(lines: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Choose color, dashes and marker of each line.

    Lines of one method share its hue. Up to three lines are the method's color and two lighter,
    dashed ones; more lines go from dark to light.

    Args:
      lines: method and label of each line.

    Returns:
      By label, the keyword arguments `color`, `linestyle` and `marker` of matplotlib's `plot`.
    """
    from matplotlib.colors import to_hex, to_rgb

    variants: dict[str, list[str]] = {}
    for method, label in dict.fromkeys(lines):
        variants.setdefault(method, []).append(label)
    colors = assign_method_colors(variants)
    styles = {}
    for index, (method, labels) in enumerate(variants.items()):
        has_few = len(labels) <= len(_VARIANT_DASHES)
        many_shifts = np.linspace(-_MAX_DARKENING, _MAX_LIGHTENING, len(labels))
        shifts = (0, 0.2, 0.35) if has_few else many_shifts
        dashes = (METHODS[method].dashes if method in METHODS else None) or "-"
        for variant, (label, shift) in enumerate(zip(labels, shifts, strict=False)):
            rgb = (1 - abs(shift)) * np.array(to_rgb(colors[method])) + max(shift, 0.0)
            styles[label] = {
                "color": to_hex(tuple(rgb)).upper(),
                "linestyle": _VARIANT_DASHES[variant] if has_few and variant else dashes,
                "marker": _MARKERS[index % len(_MARKERS)],
            }
    return styles


def darken_for_text(color: str) -> str:
    """Return a color that is dark enough for text on white, with a contrast of at least 3."""
    from matplotlib.colors import to_hex, to_rgb

    rgb = np.array(to_rgb(color))
    while _compute_relative_luminance(rgb) > 0.3:
        rgb = 0.95 * rgb
    return to_hex(tuple(rgb)).upper()


def _compute_relative_luminance(rgb: np.ndarray) -> float:
    """Return the relative luminance of an sRGB color (WCAG 2)."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


# Panels


def make_panels(
    titles: Sequence[str], *, columns: int, size: tuple[float, float], sharey: AxisSharing
) -> tuple["Figure", dict[str, "Axes"]]:
    """Make a figure with one panel per title, row by row.

    Args:
      titles: titles of the panels, all different.
      columns: panels per row, at most four.
      size: width and height of a panel in inches.
      sharey: panels that share the limits of the vertical axis.

    Returns:
      The figure, and its panels by title.
    """
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(titles), MAX_COLUMNS))
    rows = -(-len(titles) // columns)
    texts = {title: wrap_title(title, size[0] - _AXIS_INCHES) for title in titles}
    height = size[1] + _TITLE_INCHES * max(text.count("\n") for text in texts.values())
    figure = Figure(figsize=(size[0] * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    for unused_panel in grid.flat[len(titles) :]:
        unused_panel.remove()
    panels = dict(zip(titles, grid.flat, strict=False))
    for title, panel in panels.items():
        panel.set_title(texts[title], fontsize=10)
        panel.tick_params(labelsize=9)
    return figure, panels


def label_outer_axes(
    panels: Iterable["Axes"], *, x: str = "", y: str = "", size: float = 10
) -> None:
    """Label the horizontal axes of the lowest panels and the vertical axes of the first column.

    Args:
      panels: panels of one figure of `make_panels`.
      x: label of horizontal axes; a panel is labeled if no panel is below it.
      y: label of vertical axes.
      size: font size in points.
    """
    specs: list[tuple[Any, Any]] = [(panel, panel.get_subplotspec()) for panel in panels]
    for panel, spec in specs:
        below = (s for _, s in specs if s.colspan == spec.colspan)
        if y and spec.is_first_col():
            panel.set_ylabel(escape_mathtext(y), fontsize=size)
        if x and not any(s.rowspan.start > spec.rowspan.start for s in below):
            panel.set_xlabel(escape_mathtext(x), fontsize=size)


def style_axes(panel: "Axes") -> None:
    """Draw a light grid, and no frame at the top and on the right."""
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def set_integer_ticks(panel: "Axes") -> None:
    """Place the ticks of a linear horizontal axis at whole numbers."""
    locator: Any = panel.xaxis.get_major_locator()
    locator.set_params(integer=True)


def clip_percent_limits(panel: "Axes") -> None:
    """Restrict the vertical axis to accuracies from 0 to 100."""
    low, high = panel.get_ylim()
    panel.set_ylim(max(low, 0), min(high, 100))


def mark_empty_panel(panel: "Axes", text: str) -> None:
    """Write a text into a panel without data, and remove its ticks.

    Args:
      panel: the panel. Its vertical ticks stay if another panel of the figure has data.
      text: reason why the panel is empty.
    """
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", color="#666666")
    panel.set_xticks([])
    if not any(other.lines or other.collections for other in panel.figure.axes):
        panel.set_yticks([])


def add_note(figure: "Figure", text: str, *, x_label: str = "") -> None:
    """Write lines below all panels; the figure grows by them.

    Args:
      figure: the figure.
      text: a note that is wrapped to the figure's width.
      x_label: common label of the horizontal axes, above the note.
    """
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(to_one_line(text), max(30, int(width * _CHARACTERS_PER_INCH)))
    lines = [*filter(None, [x_label]), *lines]
    if lines:
        figure.set_size_inches(width, height + 0.05 + 0.15 * len(lines))
        figure.supxlabel(escape_mathtext("\n".join(lines)), fontsize=8, color="#444444")


def add_legend(figure: "Figure", handles: Sequence[Any]) -> None:
    """Draw one legend below all panels; the figure grows by it.

    Args:
      figure: the figure.
      handles: artists with labels.
    """
    if not handles:
        return
    width, height = figure.get_size_inches()
    lengths = [len(handle.get_label()) for handle in handles]

    def compute_legend_width(columns: int) -> float:
        """Return the width in points at font size 10; labels fill the legend column by column."""
        return sum(6 * max(column) + 50 for column in np.array_split(lengths, columns))

    fitting = [
        n for n in range(1, min(len(handles), 6) + 1) if compute_legend_width(n) <= 72 * width
    ]
    columns = max(fitting, default=1)
    figure.set_size_inches(width, height + 0.1 + 0.21 * -(-len(handles) // columns))
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=10
    )
    for text in legend.get_texts():
        text.set_text(escape_mathtext(text.get_text()))
