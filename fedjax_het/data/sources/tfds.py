"""Prepared tensorflow-datasets, read without TensorFlow."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedjax_het.data.array_cache import load_cached_arrays, load_or_build_arrays
from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError

_CHUNK_SIZE = 10_000  # examples read at once; bounds the memory that undecoded images take


@dataclass(frozen=True)
class TfdsSource:
    """Where tensorflow-datasets keeps a set, and how its images are stored.

    name: in messages, and of the file in the cache.
    configs: several are parts that are prepared one by one.
    transposed: rows and columns are exchanged, as in the original EMNIST files.
    class_names: where the prepared data only numbers its classes.
    """

    name: str
    builder: str
    configs: tuple[str, ...] = ("",)
    is_transposed: bool = False
    class_names: tuple[str, ...] = ()


def resolve_data_root(data_dir: str | os.PathLike | None = None) -> Path:
    """`data_dir`, else $TFDS_DATA_DIR, else ~/tensorflow_datasets (that library's default)."""
    configured_path = data_dir or env.get_value(env.TFDS_DATA_DIR)
    return Path(os.path.expanduser(configured_path or "~/tensorflow_datasets"))


def find_prepared_folder(
    source: TfdsSource, data_dir: str | os.PathLike | None = None, config: str | None = None
) -> Path:
    """The folder of the newest prepared version of a set, or of one of its parts.

    Raises `ConfigError` that says what to set or run where there is none in array_record format.
    """
    name = source.name
    relative = Path(source.builder, config or source.configs[0])
    parent = resolve_data_root(data_dir) / relative
    versions = [info.parent for info in parent.glob("*/dataset_info.json")]
    versions = [folder for folder in versions if _parse_version(folder)]
    remedy = (
        f"set TFDS_DATA_DIR (or data_dir) to a folder that holds {relative}/<version>, "
        f"or run `pip install 'fedjax_het[prepare]'` and `python -m fedjax_het.data.prepare {name}`"
    )
    if not versions:
        raise ConfigError(f"dataset = {name!r}: no prepared data in {parent}; {remedy}")
    usable = [folder for folder in versions if "array_record" in _list_formats(folder)]
    if not usable:
        format_names = ", ".join(
            sorted({format_name for folder in versions for format_name in _list_formats(folder)})
        )
        raise ConfigError(
            f"dataset = {name!r}: {parent} is prepared as {format_names or 'an unknown format'}, which "
            f"only TensorFlow reads: expected array_record; {remedy}"
        )
    return max(usable, key=_parse_version)


def load_prepared(
    source: TfdsSource,
    read: Callable[[Path], tuple[dict[str, np.ndarray], dict]],
    data_dir: str | os.PathLike | None,
    cache_dir: str | os.PathLike | None,
    config: str | None = None,
) -> tuple[dict[str, np.ndarray], dict]:
    """`read(folder)` of the prepared set, or of one of its parts, from the cache where it has it.

    Where no folder is named, and there is none where that library keeps its sets, what the cache
    has is the set: on another machine its file alone serves, without tensorflow-datasets. Raises
    `ConfigError` as `find_prepared_folder` does.
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
    """Changes when the prepared data change: the names and contents of the files. A copy has the
    same. Cost: reading them, about a second for a gigabyte."""
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with open(path, "rb") as file:
                contents = hashlib.file_digest(file, "sha256").hexdigest()
            sha.update(f"{path.name}:{contents}\n".encode())
    return sha.hexdigest()


def decode_splits(source: TfdsSource, folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Decode the train and test splits: `(arrays, {class_names, version, note})`.

    Examples keep the stored order (that of the library's hashed keys). Takes about 0.1 ms per
    small image: 8 s for the 70,000 of MNIST, once (threads were measured not to help).
    Raises `ConfigError` where the files cannot be read as their description says.
    """
    arrays, is_lossy = {}, False
    with open_builder(source.name, folder) as builder:
        features = builder.info.features
        shape = features["image"].shape
        for split in ("train", "test"):
            count = builder.info.splits[split].num_examples
            images, labels = np.empty((count, *shape), np.uint8), np.empty(count, np.int32)
            for position, (encoded, label) in enumerate(
                iter_encoded_examples(builder, split, _CHUNK_SIZE)
            ):
                images[position], labels[position] = _decode_image(encoded, shape), label
                is_lossy |= encoded.startswith(b"\xff\xd8")
            arrays[f"{split}_images"] = (
                images.swapaxes(1, 2).copy() if source.is_transposed else images
            )
            arrays[f"{split}_labels"] = labels
        class_names = source.class_names or tuple(features["label"].names)
        version = str(builder.info.version)
    note = (
        "images were re-encoded as JPEG, with loss, before they were prepared" if is_lossy else ""
    )
    return arrays, {"class_names": list(class_names), "version": version, "note": note}


@contextmanager
def open_builder(name: str, folder: Path) -> Iterator:
    """Gives the library's builder of a prepared folder; what fails inside says what to do."""
    try:
        import tensorflow_datasets as tfds

        yield tfds.builder_from_directory(folder)
    # array_record raises its own kinds for damaged files; none of them says what to do.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"dataset = {name!r}: {folder} cannot be read ({type(error).__name__}: {reason}); "
            f"prepare it again: `python -m fedjax_het.data.prepare {name}`"
        ) from error


def iter_encoded_examples(builder, split: str, chunk_size: int) -> Iterator[tuple[bytes, int]]:
    """Encoded images and labels in the stored order, `at_once` in memory.

    Decoding is left to the caller: the library's own is four times slower.
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
        info = json.loads((folder / "dataset_info.json").read_text())
        return [info.get("fileFormat", "tfrecord"), *info.get("alternativeFileFormats", [])]
    except (OSError, ValueError, AttributeError):
        return []
