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

from fedjax_het.common import variables
from fedjax_het.common.errors import ConfigError
from fedjax_het.data.cache import cached_arrays, kept_arrays

_CHUNK = 10_000  # examples read at once; bounds the memory that undecoded images take


@dataclass(frozen=True)
class Source:
    """Where tensorflow-datasets keeps a set, and how its images are stored.

    name: in messages, and of the file in the cache.
    configs: several are parts that are prepared one by one.
    transposed: rows and columns are exchanged, as in the original EMNIST files.
    class_names: where the prepared data only numbers its classes.
    """

    name: str
    builder: str
    configs: tuple[str, ...] = ("",)
    transposed: bool = False
    class_names: tuple[str, ...] = ()


def data_root(data_dir: str | os.PathLike | None = None) -> Path:
    """`data_dir`, else $TFDS_DATA_DIR, else ~/tensorflow_datasets (that library's default)."""
    named = data_dir or variables.value_of(variables.TFDS_DATA_DIR)
    return Path(os.path.expanduser(named or "~/tensorflow_datasets"))


def prepared_folder(
    source: Source, data_dir: str | os.PathLike | None = None, config: str | None = None
) -> Path:
    """The folder of the newest prepared version of a set, or of one of its parts.

    Raises `ConfigError` that says what to set or run where there is none in array_record format.
    """
    name = source.name
    relative = Path(source.builder, config or source.configs[0])
    parent = data_root(data_dir) / relative
    versions = [info.parent for info in parent.glob("*/dataset_info.json")]
    versions = [folder for folder in versions if _version(folder)]
    remedy = (
        f"set TFDS_DATA_DIR (or data_dir) to a folder that holds {relative}/<version>, "
        f"or run `pip install 'fedjax_het[prepare]'` and `python -m fedjax_het.data.prepare {name}`"
    )
    if not versions:
        raise ConfigError(f"dataset = {name!r}: no prepared data in {parent}; {remedy}")
    usable = [folder for folder in versions if "array_record" in _formats(folder)]
    if not usable:
        found = ", ".join(sorted({form for folder in versions for form in _formats(folder)}))
        raise ConfigError(
            f"dataset = {name!r}: {parent} is prepared as {found or 'an unknown format'}, which "
            f"only TensorFlow reads: expected array_record; {remedy}"
        )
    return max(usable, key=_version)


def decoded(
    source: Source,
    read: Callable[[Path], tuple[dict[str, np.ndarray], dict]],
    data_dir: str | os.PathLike | None,
    cache_dir: str | os.PathLike | None,
    config: str | None = None,
) -> tuple[dict[str, np.ndarray], dict]:
    """`read(folder)` of the prepared set, or of one of its parts, from the cache where it has it.

    Where no folder is named, and there is none where that library keeps its sets, what the cache
    has is the set: on another machine its file alone serves, without tensorflow-datasets. Raises
    `ConfigError` as `prepared_folder` does.
    """
    key = source.name if config is None else f"{source.name}-{config}"
    try:
        folder = prepared_folder(source, data_dir, config)
    except ConfigError:
        named = data_dir or variables.value_of(variables.TFDS_DATA_DIR)
        kept = None if named else kept_arrays(key, cache_dir)
        if kept is None:
            raise
        return kept
    return cached_arrays(key, fingerprint(folder), lambda: read(folder), cache_dir)


def fingerprint(folder: Path) -> str:
    """Changes when the prepared data change: the names and contents of the files. A copy has the
    same. Cost: reading them, about a second for a gigabyte."""
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with open(path, "rb") as file:
                contents = hashlib.file_digest(file, "sha256").hexdigest()
            sha.update(f"{path.name}:{contents}\n".encode())
    return sha.hexdigest()


def read_prepared(source: Source, folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Decode the train and test splits: `(arrays, {class_names, version, note})`.

    Examples keep the stored order (that of the library's hashed keys). Takes about 0.1 ms per
    small image: 8 s for the 70,000 of MNIST, once (threads were measured not to help).
    Raises `ConfigError` where the files cannot be read as their description says.
    """
    arrays, lossy = {}, False
    with reading(source.name, folder) as builder:
        features = builder.info.features
        shape = features["image"].shape
        for split in ("train", "test"):
            count = builder.info.splits[split].num_examples
            images, labels = np.empty((count, *shape), np.uint8), np.empty(count, np.int32)
            for position, (encoded, label) in enumerate(stored_examples(builder, split, _CHUNK)):
                images[position], labels[position] = _decode(encoded, shape), label
                lossy |= encoded.startswith(b"\xff\xd8")
            arrays[f"{split}_images"] = (
                images.swapaxes(1, 2).copy() if source.transposed else images
            )
            arrays[f"{split}_labels"] = labels
        class_names = source.class_names or tuple(features["label"].names)
        version = str(builder.info.version)
    note = "images were re-encoded as JPEG, with loss, before they were prepared" if lossy else ""
    return arrays, {"class_names": list(class_names), "version": version, "note": note}


@contextmanager
def reading(name: str, folder: Path) -> Iterator:
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


def stored_examples(builder, split: str, at_once: int) -> Iterator[tuple[bytes, int]]:
    """Encoded images and labels in the stored order, `at_once` in memory.

    Decoding is left to the caller: the library's own is four times slower.
    """
    import tensorflow_datasets as tfds

    count = builder.info.splits[split].num_examples
    records = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    if len(records) != count:
        raise ValueError(f"{split} holds {len(records)} examples, not {count}")
    for start in range(0, count, at_once):
        stop = min(start + at_once, count)
        for example in records.__getitems__(list(range(start, stop))):
            yield example["image"], int(example["label"])


def open_image(encoded: bytes):
    from PIL import Image

    return Image.open(io.BytesIO(encoded))


def _decode(encoded: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    with open_image(encoded) as image:
        return np.asarray(image.convert("L" if shape[-1] == 1 else "RGB")).reshape(shape)


def _version(folder: Path) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in folder.name.split("."))
    except ValueError:
        return ()


def _formats(folder: Path) -> list[str]:
    try:
        info = json.loads((folder / "dataset_info.json").read_text())
        return [info.get("fileFormat", "tfrecord"), *info.get("alternativeFileFormats", [])]
    except (OSError, ValueError, AttributeError):
        return []
