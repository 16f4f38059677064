"""CINIC-10, an image folder that its authors publish."""

from pathlib import Path

import numpy as np

from fedjax_het.data.sources.image_folder import read_image_folder
from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError


def read_cinic10(data_dir=None, cache_dir=None) -> tuple[dict[str, np.ndarray], dict]:
    """Read CINIC-10 from its image folder, through the cache.

    Args:
      data_dir: folder that holds train/ and test/. Default: $CINIC10_DIR.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.

    Returns:
      `(arrays, meta)`: images and labels of both splits by name, and class names.

    Raises:
      ConfigError: if the folder does not exist; the message names the download.
    """
    root = data_dir or env.get_value(env.CINIC10_DIR)
    if not root or not Path(root).expanduser().is_dir():
        raise ConfigError(
            f"dataset = 'cinic10': no folder {str(root)!r}; unpack CINIC-10.tar.gz "
            "(https://datashare.ed.ac.uk/handle/10283/3192) and set CINIC10_DIR (or data_dir) "
            "to the folder that holds its train/ and test/"
        )
    return read_image_folder(Path(root).expanduser(), key="cinic10", cache_dir=cache_dir)
