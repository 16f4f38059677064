"""Sources of data: each reads one format in which others publish or store labeled images."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints
from urllib.parse import parse_qsl

from fedjax_het.data.sources import (
    cifar,
    csv_table,
    domainnet_files,
    hf,
    idx,
    images,
    leaf,
    npz,
    stl10,
    tfds,
    tff,
)
from fedjax_het.data.sources.source import Content, PublishedDataset, Source
from fedjax_het.data.sources.tfds import describe_preparation, resolve_data_root
from fedjax_het.utils import env
from fedjax_het.utils.config import parse_literal, union_members
from fedjax_het.utils.errors import ConfigError, display_name, format_value, require, require_name
from fedjax_het.utils.registry import LIST_COMMAND, Registry, validate_keyword_arguments

SOURCES: Registry[Source] = Registry(
    "data source",
    (
        *(tfds.SOURCE, cifar.SOURCE, idx.SOURCE, stl10.SOURCE, domainnet_files.SOURCE),
        *(npz.SOURCE, images.SOURCE, hf.SOURCE, leaf.SOURCE, tff.SOURCE),
        csv_table.SOURCE,
    ),
)
"""Sources of data by name. A folder with files of several sources is read by the first one.

Example:
  >>> from fedjax_het.data.sources import SOURCES
  >>> SOURCES["stl10_binary"].description
  "for stl10: its authors' binary files, the labeled part"
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


class DataLocation(NamedTuple):
    """Location of a user's data, as the setting `dataset` names it: `FORMAT:LOCATION?OPTIONS`.

    Attributes:
      source: the source that reads the format.
      location: path of a file or folder, or a name.
      options: options of the source by name.
    """

    source: Source
    location: str
    options: Mapping[str, Any]


def is_location(name: object) -> bool:
    """Return whether the name of a data set has the form `FORMAT:LOCATION`."""
    return isinstance(name, str) and ":" in name


def parse_location(name: str) -> DataLocation:
    """Parse the name of a data set of the form `FORMAT:LOCATION?OPTIONS`.

    Args:
      name: the name, such as "npz:data.npz" or "npz:data.npz?channels=first".

    Returns:
      The parts.

    Raises:
      ConfigError: if there is no such format, no location, or an invalid option.

    Example:
      >>> from fedjax_het.data.sources import parse_location
      >>> parse_location("npz:data.npz?channels=first")
      DataLocation(source=Source('npz': ...), location='data.npz', options={'channels': 'first'})
    """
    format_name, _, rest = name.partition(":")
    formats = {name: source for name, source in SOURCES.items() if source.read is not None}
    argument = f"{display_name('dataset')} = {format_value(name)}"
    try:
        require_name("format", format_name, formats, listed_by=LIST_COMMAND)
        source = formats[format_name]
        location, _, query = rest.partition("?")
        require(location != "", "location", location, f"{format_name}:LOCATION")
        words = dict(parse_qsl(query, keep_blank_values=True))
        is_complete = len(words) == len(query.split("&")) or not query
        require(is_complete, "options", query, "different NAME=VALUE with & between them")
        options = validate_keyword_arguments(
            f"format {format_name!r}",
            _parse_words(source, words),
            source.read,
            source.options,
            "option",
        )
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from error
    return DataLocation(source, location, options)


def _parse_words(source: Source, words: Mapping[str, str]) -> dict[str, Any]:
    """Convert the texts of options to numbers and truth values, where these are expected."""
    annotations = get_type_hints(source.read, include_extras=True)
    return {
        name: word if str in union_members(annotations.get(name)) else parse_literal(word)
        for name, word in words.items()
    }


def read_location(
    name: str,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Content:
    """Read a user's data.

    Args:
      name: `FORMAT:LOCATION?OPTIONS`, see `parse_location`.
      data_dir: folder of relative locations. Default: the current folder.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.

    Returns:
      `(arrays, meta)`: arrays by name, and facts such as class names, the source and the order.

    Raises:
      ConfigError: if the name is invalid, or if the data cannot be read.
    """
    source, location, options = parse_location(name)
    path = Path(os.path.expanduser(data_dir or ""), os.path.expanduser(location))
    assert source.read is not None  # `parse_location` requires it
    # A name that is no path stays as it is, for sources that download.
    return source.read(str(path) if path.exists() else location, cache_dir=cache_dir, **options)
