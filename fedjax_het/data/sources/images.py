"""Folders of images in the layout `train/<class>/*` and `test/<class>/*`."""

from pathlib import Path
from typing import Any

from fedjax_het.data.image_decoding import Side
from fedjax_het.data.image_folder import read_image_folder
from fedjax_het.data.sources.source import Content, Source


def read_images(
    location: str,
    cache_dir: Any = None,
    *,
    size: tuple[Side, Side] | Side | None = None,
    color: bool = True,
    use_valid: bool = False,
    has_user_folders: bool = False,
) -> Content:
    """Read a folder of images, see `load_image_folder`.

    Args:
      location: folder that holds train/ and test/.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      size: size to which images are resized, (height, width) or one number for both, in pixels.
      color: whether to read three channels instead of one.
      use_valid: whether to add valid/ to the training images.
      has_user_folders: whether each class has a folder for each user.

    Returns:
      `(arrays, meta)`.

    Raises:
      ConfigError: if a folder is missing or empty, or if an image cannot be decoded.
    """
    return read_image_folder(
        Path(location),
        size=size,
        color=color,
        use_valid=use_valid,
        cache_dir=cache_dir,
        has_user_folders=has_user_folders,
    )


SOURCE = Source(
    "images",
    "images:FOLDER, with image files in train/<class>/ and test/<class>/",
    read=read_images,
)
