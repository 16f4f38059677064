"""DomainNet in the archives and lists that its authors publish."""

import contextlib
import hashlib
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.data.array_cache import load_or_build_arrays
from fedjax_het.data.sources.domainnet import CLASSES, DOMAINS, decode_resized, join_domains
from fedjax_het.data.sources.source import (
    FILE_ORDER,
    READ_ERRORS,
    Content,
    PublishedDataset,
    Source,
    find_folder,
    read_lines,
)
from fedjax_het.utils.errors import ConfigError

_FOLDERS = ("", "domainnet", "DomainNet")
_NUM_THREADS = 8


def find_domainnet(dataset: PublishedDataset, root: Path) -> Callable[[Any], Content] | None:
    """Find the lists and archives of DomainNet.

    Args:
      dataset: the data set.
      root: folder of `clipart_train.txt` and the other lists, and of `clipart.zip` or `clipart/`
        and the other domains; or the folder that contains it. Lists may be in a folder `txt`.

    Returns:
      A function `(cache_dir) -> content`, or None.
    """
    if dataset.name != "domainnet":
        return None
    names = [f"{folder}/{lists}" for folder in _FOLDERS for lists in ("", "txt", "splits")]
    lists = find_folder(root, [name.strip("/") for name in names], f"{DOMAINS[0]}_train.txt")
    if lists is None:
        return None
    folder = lists.parent if lists.name in ("txt", "splits") else lists

    def read(cache_dir: Any) -> Content:
        parts = [_load_domain(domain, lists, folder, cache_dir) for domain in DOMAINS]
        return join_domains(parts)

    return read


def _load_domain(domain: str, lists: Path, folder: Path, cache_dir: Any) -> Content:
    """Read the images of `CLASSES` of a domain in the order of the lists, through the cache."""
    archive = folder / f"{domain}.zip"
    if not archive.is_file() and not (folder / domain).is_dir():
        raise ConfigError(f"no file {archive} and no folder {folder / domain}")
    paths = {split: _select(lists / f"{domain}_{split}.txt") for split in ("train", "test")}

    def build() -> Content:
        arrays = {}
        with _open(folder if not archive.is_file() else archive) as read:
            for split, split_paths in paths.items():
                with ThreadPoolExecutor(_NUM_THREADS) as pool:
                    images = list(pool.map(lambda path: _decode(read, path), split_paths))
                labels = [CLASSES.index(path.split("/")[-2]) for path in split_paths]
                arrays[f"{split}_inputs"] = np.stack(images)
                arrays[f"{split}_labels"] = np.array(labels, np.int32)
        return arrays, {}

    # The archives have 17 GB: their contents are not hashed.
    stat = archive.stat() if archive.is_file() else None
    identity = repr((paths, stat and (stat.st_size, stat.st_mtime_ns)))
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()
    arrays, _ = load_or_build_arrays(f"domainnet-files-{domain}", fingerprint, build, cache_dir)
    return arrays, {"source": "archives and lists", "order": FILE_ORDER}


def _select(path: Path) -> list[str]:
    """Return the paths of images of `CLASSES` in a list of `<domain>/<class>/<file> <label>`."""
    images = [line.rsplit(maxsplit=1)[0] for line in read_lines(path)]
    selected = [
        image for image in images if image.split("/")[-2:-1] and image.split("/")[-2] in CLASSES
    ]
    if not selected:
        raise ConfigError(
            f"{path} has no image of the ten classes: expected lines such as "
            "'clipart/bird/clipart_029_000001.jpg 29'"
        )
    return selected


@contextlib.contextmanager
def _open(place: Path) -> Iterator[Callable[[str], bytes]]:
    """Yield a function that reads a file of a folder or a zip archive."""
    if place.is_dir():
        yield lambda path: (place / path).read_bytes()
        return
    try:
        archive = zipfile.ZipFile(place)
    except (zipfile.BadZipFile, OSError) as error:
        raise ConfigError(f"{place} cannot be read as a zip archive ({error})") from error
    with archive:
        yield archive.read


def _decode(read: Callable[[str], bytes], path: str) -> np.ndarray:
    try:
        return decode_resized(read(path))
    except (*READ_ERRORS, KeyError, ValueError, SyntaxError) as error:
        raise ConfigError(f"image {path} cannot be read ({error})") from error


SOURCE = Source(
    "domainnet_files",
    "for domainnet: its authors' archives or folders, and lists of images",
    find=find_domainnet,
    files={"domainnet": "clipart.zip or clipart/, clipart_train.txt and the other domains'"},
)
