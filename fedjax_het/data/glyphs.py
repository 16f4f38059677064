"""Images of characters drawn from a font: training images for a server without any data."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_het.utils.errors import ConfigError, make_value_error, require

FIGURE_POINTS = 144  # points along a side: the 2 inches of FSL
_PIXELS_PER_POINT = 2  # before the image is shrunk

# The bold face of STIX has all 52 script letters in one block. Strokes of the regular face would be
# a third as wide as EMNIST's strokes at 28 pixels. Digits are drawn in italics, as the face has
# them.
_STIX_PATH = "fonts/ttf/STIXGeneralBolIta.ttf"
_SCRIPT_UPPERCASE, _SCRIPT_LOWERCASE = 0x1D4D0, 0x1D4EA


class Font(NamedTuple):
    """A font file and its properties.

    Attributes:
      path: path of the file.
      name: full name of the face.
      version: version that the file states.
      characters: code points that the font can draw.
      uses_script_letters: whether letters are drawn as the font's mathematical script letters.
    """

    path: str
    name: str
    version: str
    characters: frozenset[int]
    uses_script_letters: bool  # letters are drawn as the font's mathematical script letters


def open_font(path: str | None = None) -> Font:
    """Open a font file.

    Args:
      path: a .ttf or .otf file. Default: the STIX font that matplotlib ships, a face with script
        letters under the SIL Open Font License 1.1.

    Returns:
      The font. The version of the default font includes matplotlib's version.

    Raises:
      ConfigError: if the file does not exist or is not a font.
    """
    import matplotlib
    from matplotlib.ft2font import FT2Font

    stix = Path(matplotlib.get_data_path(), _STIX_PATH)
    font_path = str(stix if path is None else Path(path).expanduser())
    hint = "; set the option font" if path is None else ""
    try:
        face = FT2Font(font_path)
        characters = frozenset(face.get_charmap())
        version = _parse_version(face.get_sfnt())
    # The type depends on the defect and on matplotlib's version.
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        expected = f"a .ttf or .otf file that can be read ({reason}){hint}"
        raise make_value_error("font", font_path if path is None else path, expected) from error
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
    """Draw every class in every size and rotation.

    Each character is drawn white on black in a square of 2 inches. The middle of its ink is moved
    to the middle of the square, as in EMNIST. The square is rotated and then shrunk by the mean
    over the area of each new pixel. Strokes outside the square are cut, as in a figure: the ends of
    wide script letters (K, M, W) at the larger sizes.

    The merged classes of a data set, such as EMNIST Balanced's C for C and c, are drawn as their
    name. Takes about 1 ms per image. Equal arguments give equal images.

    Args:
      class_names: name of each of the C classes, a single letter or digit.
      height: height of the images, in pixels.
      width: width of the images, in pixels.
      font: the font, see `open_font`.
      sizes: font sizes in points of 1/72 inch, rounded to half points.
      rotations: rotations in degrees, counterclockwise.

    Returns:
      `(images, labels)`: uint8 `[n, height, width, 1]` and int32 `[n]`, where
      n = C * len(sizes) * len(rotations), ordered by class, then size, then rotation.

    Raises:
      ConfigError: if a class is not a single letter or digit, if the font lacks a character, or if
        an image has no ink.
    """
    from PIL import Image, ImageDraw, ImageFont

    for name in class_names or ("",):
        is_valid = len(name) == 1 and name.isascii() and name.isalnum()
        expected = "single letters and digits, to be drawn as glyphs"
        require(is_valid, "class_names", tuple(class_names), expected)
    side, basic_layout = FIGURE_POINTS * _PIXELS_PER_POINT, ImageFont.Layout.BASIC
    images = []
    for name in class_names:
        character = _to_script_letter(name) if font.uses_script_letters else name
        require(ord(character) in font.characters, "font", font.path, f"a font with {name!r}")
        for size in sizes:
            # The basic layout gives equal images whether or not another one is installed.
            pixels_per_em = round(size * _PIXELS_PER_POINT)
            face = ImageFont.truetype(font.path, pixels_per_em, layout_engine=basic_layout)
            # The canvas has margins, since the position of the ink is known only after drawing.
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
    """Return the version in a font's name table: entry 5, as Macintosh or Windows text."""
    encodings = {(1, 0, 0, 5): "latin-1", (3, 1, 0x409, 5): "utf-16-be"}
    for key, encoding in encodings.items():
        if key in name_table:
            return name_table[key].decode(encoding).removeprefix("Version ").strip()
    return "unknown"
