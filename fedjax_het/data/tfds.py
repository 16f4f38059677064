"""Prepared data sets of tensorflow-datasets, read without TensorFlow."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedjax_het.data.array_cache import load_cached_arrays, load_or_build_arrays
from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError, display_name

_CHUNK_SIZE = 10_000  # examples read at once; bounds the memory of encoded images


@dataclass(frozen=True)
class TfdsSource:
    """Location of a data set in tensorflow-datasets, and the storage format of its images.

    Attributes:
      name: name in messages and of the cache file.
      builder: name of the library's builder.
      configs: configurations of the builder; several are parts that are prepared one by one.
      is_transposed: whether rows and columns are exchanged, as in the original EMNIST files.
      class_names: name of each class, for data that only number their classes.
    """

    name: str
    builder: str
    configs: tuple[str, ...] = ("",)
    is_transposed: bool = False
    class_names: Sequence[str] = ()


def resolve_data_root(data_dir: str | os.PathLike | None = None) -> Path:
    """Return `data_dir`, else $TFDS_DATA_DIR, else the library's ~/tensorflow_datasets."""
    configured_path = data_dir or env.get_value(env.TFDS_DATA_DIR)
    return Path(os.path.expanduser(configured_path or "~/tensorflow_datasets"))


def find_prepared_folder(
    source: TfdsSource, data_dir: str | os.PathLike | None = None, config: str | None = None
) -> Path:
    """Find the folder of the newest prepared version of a data set, or of one of its parts.

    Args:
      source: the data set.
      data_dir: folder of tensorflow-datasets, see `resolve_data_root`.
      config: the part. Default: the first one.

    Returns:
      The folder.

    Raises:
      ConfigError: if no version is prepared in array_record format; the message names the variable
        to set and the command to run.
    """
    name = source.name
    relative = Path(source.builder, config or source.configs[0])
    parent = resolve_data_root(data_dir) / relative
    folders = [info.parent for info in parent.glob("*/dataset_info.json")]
    formats = {folder: _list_formats(folder) for folder in folders if _parse_version(folder)}
    remedy = (
        f"set TFDS_DATA_DIR (or data_dir) to a folder that holds {relative}/<version>, "
        f"or run `pip install 'fedjax_het[prepare]'` and `python -m fedjax_het.data.prepare {name}`"
    )
    if not formats:
        raise ConfigError(
            f"{display_name('dataset')} = {name!r}: no prepared data in {parent}; {remedy}"
        )
    readable = [folder for folder, names in formats.items() if "array_record" in names]
    if not readable:
        names = ", ".join(sorted(set().union(*formats.values()))) or "an unknown format"
        raise ConfigError(
            f"{display_name('dataset')} = {name!r}: {parent} is prepared as {names}, which only "
            f"TensorFlow reads: expected array_record; {remedy}"
        )
    return max(readable, key=_parse_version)


def load_prepared(
    source: TfdsSource,
    read: Callable[[Path], tuple[dict[str, np.ndarray], dict]],
    data_dir: str | os.PathLike | None,
    cache_dir: str | os.PathLike | None,
    config: str | None = None,
) -> tuple[dict[str, np.ndarray], dict]:
    """Read a prepared data set, or one of its parts, through the cache.

    If no folder is named, and the library's default folder does not hold the data set, the cache
    file is used. On another machine the cache file suffices without tensorflow-datasets.

    Args:
      source: the data set.
      read: function that decodes the prepared folder and returns `(arrays, meta)`.
      data_dir: folder of tensorflow-datasets, see `resolve_data_root`.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      config: the part. Default: the first one.

    Returns:
      `(arrays, meta)`, as of `read`.

    Raises:
      ConfigError: if the data set is neither prepared nor cached, see `find_prepared_folder`.
    """
    key = source.name if config is None else f"{source.name}-{config}"
    try:
        folder = find_prepared_folder(source, data_dir, config)
    except ConfigError:
        configured_path = data_dir or env.get_value(env.TFDS_DATA_DIR)
        cache_entry = None if configured_path else load_cached_arrays(key, cache_dir)
        if cache_entry is None:
            raise
        return cache_entry
    return load_or_build_arrays(key, compute_fingerprint(folder), lambda: read(folder), cache_dir)


def compute_fingerprint(folder: Path) -> str:
    """Compute a digest of names and contents of the prepared files.

    It changes if the prepared data change; copies have equal digests. Cost: reading the files,
    about one second per gigabyte.
    """
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with open(path, "rb") as file:
                contents = hashlib.file_digest(file, "sha256").hexdigest()
            sha.update(f"{path.name}:{contents}\n".encode())
    return sha.hexdigest()


def decode_splits(source: TfdsSource, folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Decode the train and test splits of a prepared data set.

    Examples keep the stored order (by the library's hashed keys). Decoding takes about 0.1 ms
    per small image, 8 s for the 70,000 images of MNIST (threads did not help when measured).

    Args:
      source: the data set.
      folder: folder of the prepared version.

    Returns:
      `(arrays, meta)`: uint8 images `[N, H, W, C]` and int32 labels `[N]` of both splits by name,
      and class names, version and note.

    Raises:
      ConfigError: if the files do not match their description.
    """
    arrays, is_lossy = {}, False
    with open_builder(source.name, folder) as builder:
        features = builder.info.features
        shape = features["image"].shape
        for split in ("train", "test"):
            count = builder.info.splits[split].num_examples
            images, labels = np.empty((count, *shape), np.uint8), np.empty(count, np.int32)
            examples = iter_encoded_examples(builder, split, _CHUNK_SIZE)
            for position, (encoded, label) in enumerate(examples):
                images[position], labels[position] = _decode_image(encoded, shape), label
                is_lossy |= encoded.startswith(b"\xff\xd8")
            if source.is_transposed:
                images = images.swapaxes(1, 2).copy()
            arrays[f"{split}_images"] = images
            arrays[f"{split}_labels"] = labels
        class_names = source.class_names or tuple(features["label"].names)
        version = str(builder.info.version)
    note = "images were re-encoded as JPEG, with loss, before preparation" if is_lossy else ""
    return arrays, {"class_names": list(class_names), "version": version, "note": note}


@contextmanager
def open_builder(name: str, folder: Path) -> Iterator:
    """Open the library's builder of a prepared folder, and explain errors of the block.

    Args:
      name: name of the data set, for messages.
      folder: folder of the prepared version.

    Yields:
      The builder.

    Raises:
      ConfigError: for any error inside the block; the message names the command to run.
    """
    try:
        import tensorflow_datasets as tfds

        yield tfds.builder_from_directory(folder)
    # array_record raises its own types for damaged files; none of them names a remedy.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{display_name('dataset')} = {name!r}: {folder} cannot be read "
            f"({type(error).__name__}: {reason}); prepare it again: "
            f"`python -m fedjax_het.data.prepare {name}`"
        ) from error


def iter_encoded_examples(builder, split: str, chunk_size: int) -> Iterator[tuple[bytes, int]]:
    """Iterate over encoded images and labels in the stored order.

    Decoding is left to the caller: the library's own decoding is four times slower.

    Args:
      builder: builder of the prepared data set.
      split: "train" or "test".
      chunk_size: number of examples that are in memory at once.

    Yields:
      The encoded image and the label.

    Raises:
      ValueError: if the split does not hold the number of examples that its description states.
    """
    import tensorflow_datasets as tfds

    count = builder.info.splits[split].num_examples
    records = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    if len(records) != count:
        raise ValueError(f"{split} holds {len(records)} examples, not {count}")
    for start in range(0, count, chunk_size):
        stop = min(start + chunk_size, count)
        for example in records.__getitems__(list(range(start, stop))):
            yield example["image"], int(example["label"])


def open_image(encoded: bytes):
    """Open an encoded image with Pillow."""
    from PIL import Image

    return Image.open(io.BytesIO(encoded))


def _decode_image(encoded: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    with open_image(encoded) as image:
        return np.asarray(image.convert("L" if shape[-1] == 1 else "RGB")).reshape(shape)


def _parse_version(folder: Path) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in folder.name.split("."))
    except ValueError:
        return ()


def _list_formats(folder: Path) -> list[str]:
    try:
        info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        return [info.get("fileFormat", "tfrecord"), *info.get("alternativeFileFormats", [])]
    except (OSError, ValueError, AttributeError):
        return []
