"""A figure on a dark page: what is grey turns around, what has a colour becomes light enough."""

import colorsys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAPER, _INK = 0.1, 0.91  # lightness, of what was white and of what was black
_GREY = 0.12  # chroma below which a colour is a grey
_LUMINANCE = 0.22  # that a colour has at least: a contrast of 4.5 on the paper


def darken(figure: "Figure") -> None:
    """Recolour all that is drawn, in place; images, and what is written over them, stay."""
    from matplotlib.collections import Collection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    over_images = {id(part) for panel in figure.axes if panel.images for part in _content(panel)}
    for part in figure.findobj():
        if id(part) in over_images:
            continue
        if isinstance(part, Text):
            part.set_color(dark(part.get_color()))
        elif isinstance(part, Line2D):
            part.set_color(dark(part.get_color()))
            part.set_markerfacecolor(dark(part.get_markerfacecolor()))
            part.set_markeredgecolor(dark(part.get_markeredgecolor()))
        elif isinstance(part, Patch | Collection):
            edge, face = part.get_edgecolor(), part.get_facecolor()
            part.set_facecolor(_all_dark(face))
            part.set_edgecolor(_all_dark(edge))
    # Ticks are made anew when they are drawn.
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_tick_params(which="both", color=dark("k"), labelcolor=dark("k"))


def dark(colour: Any) -> Any:
    """One colour, as matplotlib has them, on a dark page; its opacity stays."""
    from matplotlib.colors import to_hex, to_rgba

    if isinstance(colour, str) and colour.lower() in ("none", "auto", "inherit"):
        return colour
    red, green, blue, alpha = to_rgba(colour)
    rgb = (red, green, blue)
    if alpha == 0:
        return colour
    if max(rgb) - min(rgb) < _GREY:
        level = _INK + (_PAPER - _INK) * sum(rgb) / 3
        return to_hex((level, level, min(1.0, 1.03 * level), alpha), keep_alpha=True)
    hue, lightness, saturation = colorsys.rgb_to_hls(*rgb)
    while _luminance(rgb) < _LUMINANCE:
        lightness += 0.02
        rgb = colorsys.hls_to_rgb(hue, lightness, saturation)
    return to_hex((*rgb, alpha), keep_alpha=True)


def _all_dark(colours: Any) -> Any:
    """Of one colour, or a row for each part of a collection."""
    array = np.asarray(colours, dtype=object)
    if array.ndim == 2:
        return [dark(tuple(map(float, row))) for row in array]
    return dark(colours)


def _luminance(rgb: Any) -> float:
    """Relative, of sRGB (WCAG 2)."""
    values = np.asarray(rgb, np.float64)
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def _content(panel: "Axes") -> list:
    return [*panel.texts, *panel.lines, *panel.collections, *panel.patches]
