"""DomainNet: the ten classes that FedBN chose, in six domains."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_het.data.sources.source import Content, PublishedDataset
from fedjax_het.data.sources.tfds import (
    iter_encoded_examples,
    load_prepared,
    open_builder,
    open_image,
)
from fedjax_het.utils.errors import ConfigError

CLASSES = (
    *("bird", "feather", "headphones", "ice_cream", "teapot"),
    *("tiger", "whale", "windmill", "wine_glass", "zebra"),
)
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
IMAGE_SIZE = 64
_CHUNK_SIZE = 1_000  # encoded photographs of about 50 kB each


def read_prepared_domains(
    dataset: PublishedDataset, root: Path | None, cache_dir: str | os.PathLike | None
) -> Content:
    """Read all images of `CLASSES` in the official lists, domain after domain, through the cache.

    Images are resized to 64x64, as in FedAF, without keeping their proportions. The filter is
    bilinear, widened where it shrinks (antialiased); FedAF names no filter. The training lists are
    used completely. FedBN uses 5 % of the smallest domain. FedAF's 200 synthetic images for each
    domain would outnumber these real images.

    Each domain is decoded once and cached in its own file.

    Args:
      dataset: DomainNet.
      root: folder of tensorflow-datasets; None: only the cache is read.
      cache_dir: folder of decoded data sets, see `dataset_cache_folder`.

    Returns:
      `(arrays, meta)`: images and labels of both splits by name, and names of classes and domains,
      and a note.

    Raises:
      ConfigError: if a domain is not prepared or cannot be read; the message names it.
    """
    parts = [load_prepared(dataset, _read_domain, root, cache_dir, domain) for domain in DOMAINS]
    return join_domains(parts)


def join_domains(parts: Sequence[Content]) -> Content:
    """Concatenate the content of all domains.

    Args:
      parts: `(arrays, meta)` of each domain, in the order of `DOMAINS`.

    Returns:
      `(arrays, meta)` with the domain of each image.
    """
    names = ("train_inputs", "train_labels", "test_inputs", "test_labels")
    arrays = {name: np.concatenate([part[name] for part, _ in parts]) for name in names}
    for split in ("train", "test"):
        sizes = [len(part[f"{split}_labels"]) for part, _ in parts]
        arrays[f"{split}_domains"] = np.repeat(np.arange(len(DOMAINS), dtype=np.int32), sizes)
    size = f"{IMAGE_SIZE}x{IMAGE_SIZE}"
    note = f"the ten classes that FedBN chose, resized to {size} (bilinear, antialiased)"
    facts = {"class_names": CLASSES, "domain_names": DOMAINS, "note": note}
    return arrays, {**facts, **{key: parts[0][1][key] for key in ("source", "order")}}


def _read_domain(folder: Path) -> Content:
    """Decode the images of `CLASSES`; reading the other images takes most of the time."""
    arrays = {}
    with open_builder(DOMAINNET.name, folder) as builder:
        names = builder.info.features["label"].names
        missing = [name for name in CLASSES if name not in names]
        if missing:
            raise ConfigError(f"labels lack {', '.join(missing)}")
        labels_by_index = {names.index(name): label for label, name in enumerate(CLASSES)}
        for split in ("train", "test"):
            examples = [
                (decode_resized(encoded), labels_by_index[label])
                for encoded, label in iter_encoded_examples(builder, split, _CHUNK_SIZE)
                if label in labels_by_index
            ]
            if not examples:
                raise ConfigError(f"{split} holds no image of the ten classes")
            images, labels = zip(*examples, strict=True)
            arrays[f"{split}_inputs"] = np.stack(images)
            arrays[f"{split}_labels"] = np.array(labels, np.int32)
        version = str(builder.info.version)
    return arrays, {"version": version}


def decode_resized(encoded: bytes) -> np.ndarray:
    """Decode an image and resize it to `[IMAGE_SIZE, IMAGE_SIZE, 3]`."""
    from PIL import Image

    with open_image(encoded) as image:
        resized = image.convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
        return np.asarray(resized)


DOMAINNET = PublishedDataset("domainnet", "domainnet", DOMAINS, read_prepared=read_prepared_domains)
"""DomainNet, each of whose domains is a configuration of tensorflow-datasets."""
