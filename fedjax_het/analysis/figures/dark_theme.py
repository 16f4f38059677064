"""A figure on a dark page: what is grey turns around, what has a colour becomes light enough."""

import colorsys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
