"""Prepared data sets of tensorflow-datasets, in array_record or TFRecord files."""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_het.data.array_cache import load_cached_arrays, load_or_build_arrays
from fedjax_het.data.sources.source import (
    FILE_ORDER,
    Content,
    PublishedDataset,
    Source,
    require_folder,
)
from fedjax_het.data.sources.tfrecord import iter_records
from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError, summarize_error

PREPARED_ORDER = "tensorflow-datasets"
"""Order of examples as tensorflow-datasets writes them, by hashed keys."""
_MISMATCH_ERRORS = (LookupError, TypeError, AttributeError)  # of the library's readers
_CHUNK_SIZE = 10_000  # examples read at once; bounds the memory of encoded images


def resolve_data_root(data_dir: str | os.PathLike | None = None) -> Path:
    """Return `data_dir`, else $TFDS_DATA_DIR, else the library's ~/tensorflow_datasets."""
    configured_path = data_dir or env.get_value(env.TFDS_DATA_DIR)
    return Path(os.path.expanduser(configured_path or "~/tensorflow_datasets"))


def find_prepared_folder(
    dataset: PublishedDataset, root: Path, config: str | None = None
) -> Path | None:
    """Find the folder of the newest prepared version of a data set, or of one of its parts.

    Folders in array_record format are preferred to TFRecord, whose examples have the same order.

    Args:
      dataset: the data set.
      root: folder of tensorflow-datasets.
      config: the part. Default: the first one.

    Returns:
      The folder; None if no version is prepared.

    Raises:
      ConfigError: if all versions have other formats.
    """
    parent = root / dataset.builder / (config or dataset.configs[0])
    folders = [info.parent for info in parent.glob("*/dataset_info.json")]
    formats = {folder: _list_formats(folder) for folder in folders if _parse_version(folder)}
    if not formats:
        return None
    for format_name in ("array_record", "tfrecord"):
        readable = [folder for folder, names in formats.items() if format_name in names]
        if readable:
            return max(readable, key=_parse_version)
    command = _get_command(dataset.name)
    if damaged := [folder for folder, names in formats.items() if not names]:
        raise ConfigError(f"{damaged[0]}/dataset_info.json is damaged: {command}")
    names = ", ".join(sorted(set().union(*formats.values())))
    raise ConfigError(
        f"{parent} is prepared as {names}, which only TensorFlow reads: expected array_record or "
        f"tfrecord; {command}"
    )


def describe_preparation(dataset: PublishedDataset, config: str | None = None) -> str:
    """Return the folder of a prepared data set, and the commands that prepare it, in words.

    Args:
      dataset: the data set.
      config: the part. Default: the first one.

    Returns:
      The text.
    """
    folder = Path(dataset.builder, config or dataset.configs[0], "<version>")
    return (
        f"{folder} of tensorflow-datasets; or run `pip install 'fedjax_het[prepare]'` and "
        f"`python -m fedjax_het.data.prepare {dataset.name}`"
    )


def _get_command(name: str) -> str:
    command = f": run `python -m fedjax_het.data.prepare {name}`" if name else ""
    return f"prepare it again with tensorflow-datasets{command}"


def find_prepared(dataset: PublishedDataset, root: Path) -> Callable[[Any], Content] | None:
    """Find a data set that tensorflow-datasets prepared.

    Args:
      dataset: the data set.
      root: folder of tensorflow-datasets.

    Returns:
      A function `(cache_dir) -> content`, or None.

    Raises:
      ConfigError: if it is prepared in a format that only TensorFlow reads.
    """
    if find_prepared_folder(dataset, root) is None:
        return None
    return partial(dataset.read_prepared or read_prepared, dataset, root)


def read_prepared(
    dataset: PublishedDataset, root: Path | None, cache_dir: str | os.PathLike | None
) -> Content:
    """Read all images of a prepared data set, through the cache.

    Args:
      dataset: the data set.
      root: folder of tensorflow-datasets; None: only the cache is read.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.

    Returns:
      `(arrays, meta)`, see `load_prepared`.
    """
    decode = partial(decode_splits, dataset)
    return load_prepared(dataset, decode, root, cache_dir)


def load_prepared(
    dataset: PublishedDataset,
    read: Callable[[Path], Content],
    root: Path | None,
    cache_dir: str | os.PathLike | None,
    config: str | None = None,
) -> Content:
    """Read a prepared data set, or one of its parts, through the cache.

    Args:
      dataset: the data set.
      read: function that decodes the prepared folder and returns `(arrays, meta)`.
      root: folder of tensorflow-datasets. None: only the cache is read, which on another machine
        suffices without tensorflow-datasets.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      config: the part. Default: the first one.

    Returns:
      `(arrays, meta)`, as of `read`.

    Raises:
      ConfigError: if the data set is not prepared, or not in the cache.
    """
    key = dataset.name if config is None else f"{dataset.name}-{config}"
    folder = None if root is None else find_prepared_folder(dataset, root, config)
    if folder is not None:
        fingerprint = compute_fingerprint(folder)
        arrays, meta = load_or_build_arrays(key, fingerprint, lambda: read(folder), cache_dir)
        form = f", {_list_formats(folder)[0]}"
    else:
        entry = load_cached_arrays(key, cache_dir) if root is None else None
        if entry is None:
            place = Path(root or "", dataset.builder, config or dataset.configs[0])
            expected = describe_preparation(dataset, config)
            raise ConfigError(f"no prepared data in {place}: expected {expected}")
        (arrays, meta), form = entry, ""
    version = f" {meta['version']}" if "version" in meta else ""
    source = f"tensorflow-datasets{version}{form}"
    return arrays, {**meta, "source": source, "order": PREPARED_ORDER}


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


def decode_splits(dataset: PublishedDataset, folder: Path, order: str = PREPARED_ORDER) -> Content:
    """Decode the train and test splits of a prepared data set.

    Examples keep the stored order (by the library's hashed keys), or have the order of the authors'
    files, which is the order of the examples' ids. Decoding takes about 0.1 ms
    per small image, 8 s for the 70,000 images of MNIST (threads did not help when measured).

    Args:
      dataset: the data set.
      folder: folder of the prepared version.
      order: `PREPARED_ORDER` or `FILE_ORDER`.

    Returns:
      `(arrays, meta)`: uint8 images `[N, H, W, C]` and int32 labels `[N]` of both splits by name,
      and class names, version and note.

    Raises:
      ConfigError: if the files do not match their description, or if examples have no ids and
        `order` needs them.
    """
    arrays, ids, is_lossy = {}, dict[str, list[bytes]](), False
    if order == FILE_ORDER:
        _require_ids(dataset, folder)
    with open_builder(dataset.name, folder) as builder:
        features = builder.info.features
        shape = features["image"].shape
        for split in ("train", "test"):
            count = builder.info.splits[split].num_examples
            images, labels = np.empty((count, *shape), np.uint8), np.empty(count, np.int32)
            ids[split] = []
            for position, example in enumerate(_iter_examples(builder, split, _CHUNK_SIZE)):
                encoded = example["image"]
                images[position] = _decode_image(encoded, shape)
                labels[position] = int(example["label"])
                is_lossy |= encoded.startswith(b"\xff\xd8")
                if order == FILE_ORDER:
                    ids[split].append(example["id"])
            if dataset.is_transposed:
                images = images.swapaxes(1, 2).copy()
            arrays[f"{split}_inputs"] = images
            arrays[f"{split}_labels"] = labels
        class_names = dataset.class_names or tuple(features["label"].names)
        version = str(builder.info.version)
    if order == FILE_ORDER:
        for split in ids:
            positions = _parse_positions(dataset, ids[split])
            for name in (f"{split}_inputs", f"{split}_labels"):
                arrays[name] = arrays[name][np.argsort(positions)]
    note = "images were re-encoded as JPEG, with loss, before preparation" if is_lossy else ""
    return arrays, {"class_names": list(class_names), "version": version, "note": note}


@contextmanager
def open_builder(name: str, folder: Path) -> Iterator:
    """Open the library's builder of a prepared folder, and explain errors of the block.

    Args:
      name: name of the data set for the command in messages, or "".
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
        reason = f"{type(error).__name__}: {summarize_error(error)}"
        if isinstance(error, _MISMATCH_ERRORS):
            reason = "its files do not fit dataset_info.json and features.json"
        raise ConfigError(f"{folder} cannot be read ({reason}): {_get_command(name)}") from error


def iter_encoded_examples(builder, split: str, chunk_size: int) -> Iterator[tuple[bytes, int]]:
    """Iterate over encoded images and labels in the stored order.

    Decoding is left to the caller: the library's own decoding is four times slower.

    Args:
      builder: builder of the prepared data set.
      split: "train" or "test".
      chunk_size: number of examples of array_record files that are in memory at once.

    Yields:
      The encoded image and the label.

    Raises:
      ValueError: if the split does not hold the number of examples that its description states.
    """
    for example in _iter_examples(builder, split, chunk_size):
        yield example["image"], int(example["label"])


def _iter_examples(builder: Any, split: str, chunk_size: int) -> Iterator[dict[str, Any]]:
    """Iterate over examples with encoded images, see `iter_encoded_examples`."""
    import tensorflow_datasets as tfds

    count = builder.info.splits[split].num_examples
    decoders = {"image": tfds.decode.SkipDecoding()}
    if builder.info.file_format == tfds.core.FileFormat.TFRECORD:
        yield from _iter_tfrecord_examples(builder, split, decoders)
        return
    records = builder.as_data_source(split, decoders=decoders)
    if len(records) != count:
        raise ValueError(f"{split} holds {len(records)} examples, not {count}")
    for start in range(0, count, chunk_size):
        stop = min(start + chunk_size, count)
        yield from records.__getitems__(list(range(start, stop)))


def _iter_tfrecord_examples(
    builder: Any, split: str, decoders: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Iterate over examples with encoded images in TFRecord files."""
    info, count = builder.info.splits[split], 0
    for path in info.filepaths:
        for record in iter_records(Path(path)):
            yield builder.info.features.deserialize_example_np(record, decoders=decoders)
            count += 1
    if count != info.num_examples:
        raise ValueError(f"{split} holds {count} examples, not {info.num_examples}")


def _require_ids(dataset: PublishedDataset, folder: Path) -> None:
    """Raise ConfigError unless examples of a prepared data set have ids."""
    with open_builder(dataset.name, folder) as builder:
        has_ids = "id" in builder.info.features
    if not has_ids:
        raise ConfigError(
            f"order = {FILE_ORDER!r}: {dataset.builder} is stored in the order of hashed keys, and "
            "its examples have no ids: expected no value, or the files of the authors"
        )


def _parse_positions(dataset: PublishedDataset, ids: list[bytes]) -> np.ndarray:
    """Return the position in the authors' files that each id states: 16399 of `train_16399`.

    Raises:
      ConfigError: unless the ids state each position once.
    """
    matches = [re.fullmatch(rb"[a-z]+_(\d+)", text) for text in ids]
    positions = np.array([-1 if match is None else int(match[1]) for match in matches])
    wrong = np.flatnonzero(np.sort(positions) != np.arange(len(ids)))
    if len(wrong):
        text = ids[int(np.argmin(positions))].decode(errors="replace")
        raise ConfigError(
            f"order = {FILE_ORDER!r}: ids of {dataset.builder}, such as {text!r}, are no positions in "
            "the files of the authors: expected no value, or these files"
        )
    return positions


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


def read_folder(
    location: str, cache_dir: Any = None, *, order: Literal["files"] | None = None
) -> Content:
    """Read any data set of labeled images that tensorflow-datasets prepared, through the cache.

    Args:
      location: folder of a version, such as "svhn_cropped/3.1.0", or the folder of all versions.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.
      order: "files" for the order of the authors' files, which ids of the examples state, as those
        of CIFAR-10 do. Default: the stored order, by hashed keys.

    Returns:
      `(arrays, meta)`.

    Raises:
      ConfigError: if the folder has no prepared version, or if it cannot be read. The data need
        the splits train and test, and the features image, of one shape, and label.
    """
    folder = Path(location).absolute()
    require_folder(Path(location), "; data_dir names the folder of relative paths")
    parent = folder.parent if (folder / "dataset_info.json").is_file() else folder
    dataset = PublishedDataset("", parent.name)
    if parent == folder:
        newest = find_prepared_folder(dataset, parent.parent)
        if newest is None:
            raise ConfigError(
                f"{location} has no prepared version: expected a folder with "
                "dataset_info.json, or with folders of versions"
            )
        folder = newest
    fingerprint = compute_fingerprint(folder)
    decode = partial(decode_splits, dataset, folder, order or PREPARED_ORDER)
    key = f"tfds-{fingerprint[:16]}{f'-{order}' if order else ''}"
    arrays, meta = load_or_build_arrays(key, fingerprint, decode, cache_dir)
    source = f"tensorflow-datasets {meta['version']}, {_list_formats(folder)[0]}"
    return arrays, {**meta, "source": source, "order": order or PREPARED_ORDER}


SOURCE = Source(
    "tfds",
    "tfds:FOLDER, which tensorflow-datasets prepared: array_record or TFRecord",
    read=read_folder,
    find=find_prepared,
)
