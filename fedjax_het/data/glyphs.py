"""Characters drawn from a font: what a server can learn to read letters from without any data."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_het.utils.errors import ConfigError, display_name, require

FIGURE_POINTS = 144  # points along a side: FSL's 2 inches
_PIXELS_PER_POINT = 2  # before the image is made small

# In the bold face of STIX all 52 script letters are in one block; the regular one's strokes are a
# third as wide as those of EMNIST once the figure has 28 pixels. Its digits are its italic ones.
_STIX_PATH = "fonts/ttf/STIXGeneralBolIta.ttf"
_SCRIPT_UPPERCASE, _SCRIPT_LOWERCASE = 0x1D4D0, 0x1D4EA


class Font(NamedTuple):
    """A font file: its full name, its version as the file states it, and what it has."""

    path: str
    name: str
    version: str
    characters: frozenset[int]
    uses_script_letters: bool  # letters are drawn as the font's mathematical script letters


def open_font(path: str | None = None) -> Font:
    """The font file at `path`; by default the STIX that matplotlib brings, a face with script
    letters under the SIL Open Font License 1.1.

    The default's version tells matplotlib's too. Raises `ConfigError` where there is no such file
    or it is no font (.ttf, .otf).
    """
    import matplotlib
    from matplotlib.ft2font import FT2Font

    stix = Path(matplotlib.get_data_path(), _STIX_PATH)
    font_path = str(stix if path is None else Path(path).expanduser())
    hint = "; give the option font" if path is None else ""
    try:
        face = FT2Font(font_path)
        characters = frozenset(face.get_charmap())
        version = _parse_version(face.get_sfnt())
    # Which of them depends on what is wrong, and on matplotlib's version.
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{display_name('font')} = {(font_path if path is None else path)!r}: expected a .ttf or .otf "
            f"file that can be read ({reason}){hint}"
        ) from error
    name = f"{face.family_name} {face.style_name}"
    if path is None:
        name, version = f"{name}, script letters", f"{version}, matplotlib {matplotlib.__version__}"
    return Font(font_path, name, version, characters, path is None)


def render_glyphs(
    class_names: Sequence[str],
    height: int,
    width: int,
    *,
    font: Font,
    sizes: Sequence[float],
    rotations: Sequence[float],
) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [n, height, width, 1], labels int32 [n]) of every class, size and rotation.

    Each character is drawn white on black in a square of 2 inches, the middle of its ink in the
    middle of the square (EMNIST centres so too), at `sizes` in points of 1/72 inch (rounded to half
    ones), turned by `rotations` in degrees against the clock, and made small by the mean over each
    new pixel's area. What sticks out is cut, as a figure cuts it: ends of wide script letters (K,
    M, W) at the larger sizes. Class after class, and in it size after size. About 1 ms an image;
    the same each time.

    The sources' merged classes, such as EMNIST Balanced's C for C and c, are drawn as they are
    named. Raises `ConfigError` for a class that is no single letter or digit, one that the font
    lacks, and images without ink.
    """
    from PIL import Image, ImageDraw, ImageFont

    for name in class_names or ("",):
        require(
            len(name) == 1 and name.isascii() and name.isalnum(),
            "class_names",
            tuple(class_names),
            "single letters and digits, to be drawn as glyphs",
        )
    side = FIGURE_POINTS * _PIXELS_PER_POINT
    images = []
    for name in class_names:
        character = _to_script_letter(name) if font.uses_script_letters else name
        require(ord(character) in font.characters, "font", font.path, f"a font with {name!r}")
        for size in sizes:
            # The plain layout, whether or not another one is installed.
            face = ImageFont.truetype(
                font.path, round(size * _PIXELS_PER_POINT), layout_engine=ImageFont.Layout.BASIC
            )
            # Room all around, since where the ink is shows only once it is drawn.
            canvas = Image.new("L", (2 * side, 2 * side))
            ImageDraw.Draw(canvas).text((side, side), character, fill=255, font=face, anchor="mm")
            left, top, right, bottom = canvas.getbbox() or (side, side, side, side)
            corner = ((left + right - side) // 2, (top + bottom - side) // 2)
            glyph = canvas.crop((*corner, corner[0] + side, corner[1] + side))
            for rotation in rotations:
                rotated = glyph.rotate(rotation, resample=Image.Resampling.BILINEAR)
                pixels = np.asarray(rotated.resize((width, height), Image.Resampling.BOX))
                if not pixels.any():
                    raise ConfigError(
                        f"glyphs: {name!r} of {font.name} at {size:g} pt leaves no ink in "
                        f"{height}x{width} pixels: expected larger sizes or another font"
                    )
                images.append(pixels[..., None])
    labels = np.repeat(np.arange(len(class_names), dtype=np.int32), len(sizes) * len(rotations))
    return np.stack(images), labels


def _to_script_letter(name: str) -> str:
    if name.isdigit():
        return name
    start, first = (_SCRIPT_UPPERCASE, "A") if name.isupper() else (_SCRIPT_LOWERCASE, "a")
    return chr(start + ord(name) - ord(first))


def _parse_version(name_table: dict) -> str:
    """Of a font's name table, whose entry 5 is the version, as Macintosh or Windows text."""
    encodings = {(1, 0, 0, 5): "latin-1", (3, 1, 0x409, 5): "utf-16-be"}
    for key, encoding in encodings.items():
        if key in name_table:
            return name_table[key].decode(encoding).removeprefix("Version ").strip()
    return "unknown"
