"""Fonts of figures: which installed font has a character."""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("fedjax_het")


@functools.lru_cache(maxsize=10_000)
def find_font(character: str) -> str | None:
    """Find an installed font that has a character.

    The log has a line of level INFO for each character that no font has.

    Args:
      character: one character.

    Returns:
      "" if matplotlib's default font has it, otherwise the family of a font; None without a font.

    Example:
      >>> from fedjax_het.utils.fonts import find_font
      >>> find_font("ä")
      ''
    """
    from matplotlib import font_manager

    if ord(character) in _read_characters(font_manager.findfont(font_manager.FontProperties())):
        return ""
    for path, family in _list_regular_fonts():
        if ord(character) in _read_characters(path):
            return family
    log.info(
        "no installed font has %s (U+%04X): figures show the code point; a font such as Noto Sans "
        "CJK can be installed",
        character,
        ord(character),
    )
    return None


def replace_missing_characters(text: str) -> str:
    """Return a text with the code points of characters that no font has, e.g. `[U+72D7]`."""
    if text.isascii():
        return text
    return "".join(
        f"[U+{ord(c):04X}]" if c.isprintable() and find_font(c) is None else c for c in text
    )


def choose_fonts(figure: Any) -> Any:
    """Add the fonts that a figure's texts need to the families of these texts.

    Args:
      figure: a figure of matplotlib.

    Returns:
      The figure.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        fonts = {find_font(c) for c in text.get_text() if not c.isascii() and c.isprintable()}
        families = text.get_fontfamily()
        missing = sorted(font for font in fonts if font and font not in families)
        if missing:
            text.set_fontfamily([*families, *missing])
    return figure


def _list_regular_fonts() -> Iterator[tuple[str, str]]:
    """Yield files and families of upright fonts of normal weight, sans-serif ones first."""
    from matplotlib import font_manager

    fonts = [f for f in font_manager.fontManager.ttflist if f.style == "normal"]
    fonts.sort(
        key=lambda f: (f.weight not in (400, "normal"), "sans" not in f.name.lower(), f.name)
    )
    yield from dict.fromkeys((font.fname, font.name) for font in fonts)


@functools.lru_cache(maxsize=10_000)
def _read_characters(path: str) -> frozenset[int]:
    """Return the code points of a font's glyphs; none if matplotlib cannot use the font."""
    from matplotlib.ft2font import FT2Font

    if Path(path).name == "LastResortHE-Regular.ttf":  # matplotlib's boxes for missing glyphs
        return frozenset()
    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # e.g. fonts of colored bitmaps
        return frozenset()
