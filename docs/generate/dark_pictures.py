"""Dark variants of the site's pictures, made from their files."""

import io
import re
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

PAPER, INK = (30, 33, 41), (208, 211, 220)  # page and text of the site's dark scheme
LUMINANCE = (0.2126, 0.7152, 0.0722)
MIN_PAPER_SHARE = 0.4  # of a plot; pictures with less paper show images or heat maps
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]+)\.png\)")


def make_dark_variant(content: bytes) -> bytes:
    """Return a picture for dark pages: a plot's dark colors become light ones of the same hue.

    Pictures of images stay as they are, on white paper.

    Args:
      content: a PNG file.

    Returns:
      A PNG file.
    """
    rgb = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) / 255
    luminance = rgb @ LUMINANCE
    if (luminance > 0.99).mean() < MIN_PAPER_SHARE:
        return content
    inverted = (rgb + (1 - 2 * luminance[..., None])).clip(0, 1)
    dark = Image.fromarray((PAPER + inverted * np.subtract(INK, PAPER)).round().astype(np.uint8))
    buffer = io.BytesIO()
    dark.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def get_dark_path(path: str) -> str:
    """Return the path of a picture's dark variant, `plot-dark.png` of `plot.png`."""
    return str(PurePosixPath(path).with_suffix("")) + "-dark.png"


def insert_dark_variants(markdown: str) -> str:
    """Add to each picture of a page its dark variant; a page shows one of both.

    Args:
      markdown: text of the page.

    Returns:
      The changed text. Pictures that name a scheme in their fragment stay.
    """
    return PICTURE.sub(
        lambda found: (
            f"![{found[1]}]({found[2]}.png#only-light)"
            f"![{found[1]}]({get_dark_path(found[2] + '.png')}#only-dark)"
        ),
        markdown,
    )
