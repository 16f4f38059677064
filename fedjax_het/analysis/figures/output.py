"""Figures as files: formats, variants for dark pages, and alternative texts."""

import colorsys
import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.io import write_atomically
from fedjax_het.utils.text import to_one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FIGURE_FORMATS = ("pdf", "svg", "dark")
DARK_SUFFIX = "-dark"  # of a file's name
_extra_formats: tuple[str, ...] = ()


@contextlib.contextmanager
def write_extra_formats(formats: Sequence[str]) -> Iterator[None]:
    """Return a context in which every figure is also written in these formats.

    Args:
      formats: formats of `FIGURE_FORMATS`; `dark` writes a variant for dark pages, `NAME-dark.png`.

    Raises:
      ConfigError: if a format is unknown.
    """
    global _extra_formats
    for kind in formats:
        require_name("pictures", kind, FIGURE_FORMATS)
    previous_formats, _extra_formats = _extra_formats, tuple(dict.fromkeys(formats))
    try:
        yield
    finally:
        _extra_formats = previous_formats


def write_figure(path: str | os.PathLike, figure: "Figure", *, dpi: int = 150) -> Path:
    """Write a figure to a file, and in the formats of `write_extra_formats` beside it.

    The file is replaced in one step. A character that the font lacks becomes a box without a
    warning, since names may be in any script.

    Args:
      path: file to write; its suffix determines the format (default: PNG).
      figure: the figure.
      dpi: resolution of a PNG.

    Returns:
      The path.

    Raises:
      OSError: if the file cannot be written.
    """
    path = Path(path)
    if not path.suffix:
        path = path.with_suffix(".png")
    extension = path.suffix[1:].lower()
    supported_formats = figure.canvas.get_supported_filetypes()
    require(
        extension in supported_formats,
        "path",
        str(path),
        f"a picture's ending: {', '.join(sorted(supported_formats))}",
    )
    paths = [path, *(path.with_suffix(f".{kind}") for kind in _extra_formats if kind != "dark")]
    for figure_path in dict.fromkeys(paths):
        _save_figure(figure_path, figure, dpi)
    if "dark" in _extra_formats:
        apply_dark_theme(figure)
        for figure_path in dict.fromkeys(paths):
            _save_figure(figure_path.with_stem(f"{figure_path.stem}{DARK_SUFFIX}"), figure, dpi)
    return path


@contextlib.contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """In here a character that the font lacks is a box, and no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from", category=UserWarning)
        yield


def _save_figure(path: Path, figure: "Figure", dpi: int) -> None:
    extension = path.suffix[1:].lower()
    # Of what a page puts in the place of a picture that is not seen.
    metadata = {"Description": describe_figure(figure)} if extension in ("png", "svg") else None
    with ignore_missing_glyphs():
        write_atomically(
            path, lambda file: figure.savefig(file, format=extension, dpi=dpi, metadata=metadata)
        )


def style_axes(panel: "Axes") -> None:
    """A light grid, and no frame where there is no axis."""
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


_BACKGROUND_LIGHTNESS, _FOREGROUND_LIGHTNESS = (
    0.1,
    0.91,
)  # lightness, of what was white and of what was black
_MAX_GRAY_CHROMA = 0.12  # chroma below which a colour is a grey
_MIN_LUMINANCE = 0.22  # that a colour has at least: a contrast of 4.5 on the paper


def apply_dark_theme(figure: "Figure") -> None:
    """Recolour all that is drawn, in place; images, and what is written over them, stay."""
    from matplotlib.collections import Collection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    artist_ids_over_images = {
        id(part) for panel in figure.axes if panel.images for part in _list_artists(panel)
    }
    for artist in figure.findobj():
        if id(artist) in artist_ids_over_images:
            continue
        if isinstance(artist, Text):
            artist.set_color(to_dark_color(artist.get_color()))
        elif isinstance(artist, Line2D):
            artist.set_color(to_dark_color(artist.get_color()))
            artist.set_markerfacecolor(to_dark_color(artist.get_markerfacecolor()))
            artist.set_markeredgecolor(to_dark_color(artist.get_markeredgecolor()))
        elif isinstance(artist, Patch | Collection):
            edge, face = artist.get_edgecolor(), artist.get_facecolor()
            artist.set_facecolor(_to_dark_colors(face))
            artist.set_edgecolor(_to_dark_colors(edge))
    # Ticks are made anew when they are drawn.
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_tick_params(
                which="both", color=to_dark_color("k"), labelcolor=to_dark_color("k")
            )


def to_dark_color(color: Any) -> Any:
    """One colour, as matplotlib has them, on a dark page; its opacity stays."""
    from matplotlib.colors import to_hex, to_rgba

    if isinstance(color, str) and color.lower() in ("none", "auto", "inherit"):
        return color
    red, green, blue, alpha = to_rgba(color)
    rgb = (red, green, blue)
    if alpha == 0:
        return color
    if max(rgb) - min(rgb) < _MAX_GRAY_CHROMA:
        level = (
            _FOREGROUND_LIGHTNESS + (_BACKGROUND_LIGHTNESS - _FOREGROUND_LIGHTNESS) * sum(rgb) / 3
        )
        return to_hex((level, level, min(1.0, 1.03 * level), alpha), keep_alpha=True)
    hue, lightness, saturation = colorsys.rgb_to_hls(*rgb)
    while _relative_luminance(rgb) < _MIN_LUMINANCE:
        lightness += 0.02
        rgb = colorsys.hls_to_rgb(hue, lightness, saturation)
    return to_hex((*rgb, alpha), keep_alpha=True)


def _to_dark_colors(colors: Any) -> Any:
    """Of one colour, or a row for each part of a collection."""
    array = np.asarray(colors, dtype=object)
    if array.ndim == 2:
        return [to_dark_color(tuple(map(float, row))) for row in array]
    return to_dark_color(colors)


def _relative_luminance(rgb: Any) -> float:
    """Relative, of sRGB (WCAG 2)."""
    values = np.asarray(rgb, np.float64)
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def _list_artists(panel: "Axes") -> list:
    return [*panel.texts, *panel.lines, *panel.collections, *panel.patches]


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
