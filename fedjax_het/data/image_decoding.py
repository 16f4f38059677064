"""Decoding of image files to 8-bit pixels, equally for all formats that Pillow reads."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import numpy as np

from fedjax_het.utils.config import Bounds
from fedjax_het.utils.errors import ConfigError, require

_NUM_THREADS = 8  # hides the latency of opening many small files
_ORIENTATION_TAG = 0x0112  # EXIF
_GRAY_MODES = ("1", "L", "LA", "La", "I", "F")
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")

MAX_SIDE = 4096
"""Largest height and width of resized images, in pixels."""
Side = Annotated[int, Bounds(1, MAX_SIDE)]
"""Height or width of resized images, in pixels."""

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
"""Suffixes of image files, in lower case."""

_log = logging.getLogger("fedjax_het")


def to_height_and_width(size: Any) -> tuple[int, int] | None:
    """Return the size of resized images as height and width.

    Args:
      size: one number for both, (height, width), or None.

    Returns:
      (height, width), or None.

    Raises:
      ConfigError: for any other value.
    """
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    is_valid = len(sides) == 2 and all(
        isinstance(side, int) and not isinstance(side, bool) and 1 <= side <= MAX_SIDE
        for side in sides
    )
    require(is_valid, "size", size, f"one or two numbers from 1 to {MAX_SIDE}")
    return sides


def decode_images(
    files: Sequence[Any],
    describe: Callable[[int], str],
    *,
    size: tuple[int, int] | None = None,
    color: bool | None = True,
) -> np.ndarray:
    """Decode images of one size.

    All images become 8-bit images of one number of channels: gray values are repeated, palettes are
    applied, and 16-bit values are scaled. Transparent pixels have their stored colors; a
    warning counts their images.

    Args:
      files: a path, the bytes of a file, or an image of Pillow for each image.
      describe: function of the position that returns the name of an image, for messages.
      size: (height, width) to which images are resized, antialiased, or None.
      color: whether to return three channels instead of one; None: if any image has color.

    Returns:
      Images, uint8 `[N, H, W, C]`.

    Raises:
      ConfigError: if an image cannot be decoded, or if sizes differ; the message names the image.
    """
    if color is None:
        color = any(_has_color(file, describe(i)) for i, file in enumerate(files))
    first, _ = _decode_image(files[0], describe(0), size, color)
    images = np.empty((len(files), *first.shape), np.uint8)

    def decode_at(position: int) -> bool:
        name = describe(position)
        image, is_transparent = _decode_image(files[position], name, size, color)
        if image.shape != first.shape:
            raise ConfigError(
                f"size of {name} = {image.shape[:2]}: expected {first.shape[:2]} as in "
                f"{describe(0)}; set size=(height, width) to resize"
            )
        images[position] = image
        return is_transparent

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        transparent = np.flatnonzero(list(pool.map(decode_at, range(len(files)))))
    if len(transparent):
        _log.warning(
            "%d of %d images have transparent pixels, which have their stored colors: e.g. %s",
            len(transparent),
            len(files),
            describe(int(transparent[0])),
        )
    return images


def _has_color(file: Any, name: str) -> bool:
    with _open_image(file, name) as image:
        return not (image.mode in _GRAY_MODES or image.mode.startswith("I;16"))


@contextlib.contextmanager
def _open_image(file: Any, name: str) -> Iterator[Any]:
    """Open an image with Pillow, and name it in errors of the block."""
    from PIL import Image

    try:
        if isinstance(file, Image.Image):
            yield file
        else:
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
                yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"image {name} cannot be decoded ({error})") from error


def _decode_image(
    file: Any, name: str, size: tuple[int, int] | None, color: bool
) -> tuple[np.ndarray, bool]:
    """Return the pixels `[H, W, C]`, and whether the image has transparent pixels."""
    from PIL import Image, ImageOps

    with _open_image(file, name) as image:
        if image is not file:  # an image of the user may already be upright
            _require_readable_orientation(image)
            image.load()  # TIFF files are turned while they are loaded, and lose the tag
            with contextlib.suppress(Exception):  # damaged EXIF data: the image as it is stored
                ImageOps.exif_transpose(image, in_place=True)
        image, is_transparent = _remove_transparency(_to_8_bit(image))
        image = image.convert("RGB" if color else "L")
        if size is not None:
            image = image.resize((size[1], size[0]), Image.Resampling.LANCZOS)
        pixels = np.asarray(image)
    return pixels if color else pixels[..., None], is_transparent


def _remove_transparency(image: Any) -> tuple[Any, bool]:
    """Return an image without transparency, and whether any pixel was transparent."""
    if image.mode not in _ALPHA_MODES and "transparency" not in image.info:
        return image, False
    with_alpha = image.convert("RGBA")
    is_transparent = with_alpha.getchannel("A").getextrema()[0] < 255
    return with_alpha.convert("RGB"), is_transparent


def _require_readable_orientation(image: Any) -> None:
    """Raise ValueError for an uncompressed TIFF file on its side: Pillow 13 mixes its pixels up."""
    is_on_its_side = image.format == "TIFF" and image.tag_v2.get(_ORIENTATION_TAG, 1) >= 5
    if is_on_its_side and image.tile[0][0] == "raw":
        raise ValueError("uncompressed TIFF with an EXIF rotation: expected a compressed file")


def _to_8_bit(image: Any) -> Any:
    """Scale an opened 16-bit image to 8 bits and return any other image unchanged.

    `convert` would cut values off at 255. Raises ValueError for 32-bit images, whose white is
    unknown.
    """
    from PIL import Image

    is_16_bit = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if image.mode in ("I", "F") and not is_16_bit:
        raise ValueError(f"mode {image.mode!r} has 32 bits per pixel: expected 8 or 16")
    if not is_16_bit:
        return image
    pixels = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((pixels + 128) // 257).astype(np.uint8))
