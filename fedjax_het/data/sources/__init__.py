"""Sources of data: each reads one format in which others publish or store labeled images."""

import contextlib
import os

from fedjax_het.data.sources import cifar, idx, stl10, tfds
from fedjax_het.data.sources.source import Content, PublishedDataset, Source
from fedjax_het.data.sources.tfds import describe_preparation, resolve_data_root
from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError, display_name
from fedjax_het.utils.registry import Registry

SOURCES: Registry[Source] = Registry(
    "data source",
    (tfds.SOURCE, cifar.SOURCE, idx.SOURCE, stl10.SOURCE),
)
"""Sources of data by name. A folder with files of several sources is read by the first one.

Example:
  >>> from fedjax_het.data.sources import SOURCES
  >>> SOURCES["stl10"].description
  "the labeled part of STL-10 in its authors' binary files"
"""


def read_published(
    dataset: PublishedDataset,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Content:
    """Read a data set in whichever published format a folder has.

    Args:
      dataset: the data set.
      data_dir: folder of the files, see `resolve_data_root`. If no folder is named, and the default
        folder does not hold the data set, the cache is read.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.

    Returns:
      `(arrays, meta)`: arrays by name, and facts such as class names, the source and the order.

    Raises:
      ConfigError: if there are no files, or if they cannot be read; the message lists the accepted
        files.
    """
    root = resolve_data_root(data_dir)
    try:
        for source in SOURCES.values():
            read = None if source.find is None else source.find(dataset, root)
            if read is not None:
                return read(cache_dir)
        if not (data_dir or env.get_value(env.TFDS_DATA_DIR)):
            with contextlib.suppress(ConfigError):
                return (dataset.read_prepared or tfds.read_prepared)(dataset, None, cache_dir)
        accepted = [s.files[dataset.name] for s in SOURCES.values() if dataset.name in s.files]
        expected = ", ".join([*accepted, describe_preparation(dataset)])
        raise ConfigError(
            f"no data in {root}; set TFDS_DATA_DIR (or data_dir) to a folder that holds {expected}"
        )
    except ConfigError as error:
        raise ConfigError(f"{display_name('dataset')} = {dataset.name!r}: {error}") from error
