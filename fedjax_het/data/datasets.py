"""Data sets by name."""

import os
from pathlib import Path

from fedjax_het.common.errors import ConfigError, require_name
from fedjax_het.data.cache import cached_arrays
from fedjax_het.data.dataset import Dataset, dataset_from_arrays
from fedjax_het.data.digits import read_digits
from fedjax_het.data.domainnet import read_domainnet
from fedjax_het.data.emnist import first_45_classes
from fedjax_het.data.folder import read_image_folder
from fedjax_het.data.normalisation import normalisation_constants
from fedjax_het.data.tfds import fingerprint, prepared_folder, read_prepared

DATASETS = {
    "digits": "scikit-learn's digits: 1,797 grey 8x8 images, 10 classes; needs no download",
    "mnist": "MNIST: 60,000 + 10,000 grey 28x28 images, 10 classes",
    "fashion_mnist": "Fashion-MNIST: 60,000 + 10,000 grey 28x28 images, 10 classes",
    "cifar10": "CIFAR-10: 50,000 + 10,000 colour 32x32 images, 10 classes",
    "cifar100": "CIFAR-100: 50,000 + 10,000 colour 32x32 images, 100 classes",
    "cinic10": "CINIC-10: 90,000 + 90,000 colour 32x32 images, 10 classes; an image folder",
    "emnist_balanced": "EMNIST Balanced: 112,800 + 18,800 grey 28x28 images, 47 classes",
    "emnist_45": "EMNIST Balanced without r and t, for FSL: 108,000 + 10,000 images, 45 classes",
    "emnist_byclass": "EMNIST ByClass: 697,932 + 116,323 grey 28x28 images, 62 classes",
    "domainnet": "DomainNet, FedBN's ten classes: about 22,500 colour images at 64x64, 6 domains",
    "stl10": "STL-10, the labelled part: 5,000 + 8,000 colour 96x96 images, 10 classes",
}


def load_dataset(
    name: str,
    *,
    normalisation: str | None = None,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Load one of `DATASETS`: decoded once, then read from the cache in well under a second.

    normalisation: whose constants, one of `fedjax_het.data.NORMALISATIONS`; by default DynaFed's
        where it has them (it gives Fashion-MNIST those of MNIST), else the training set's own.
    data_dir: where the data are. For `cinic10`, the folder of train/ and test/ (default:
        $CINIC10_DIR). Otherwise a folder of tensorflow-datasets prepared in array_record format
        (default: $TFDS_DATA_DIR), read without TensorFlow. `digits` is embedded.
    cache_dir: see `fedjax_het.data.cache.cache_folder`.

    Raises `ConfigError` for an unknown name or preset, and for data that are missing or cannot be
    read; it says what to set or run.
    """
    require_name("dataset", name, DATASETS)
    if name == "digits":
        arrays, meta = read_digits(), {"class_names": [str(digit) for digit in range(10)]}
    elif name == "cinic10":
        arrays, meta = _read_cinic10(data_dir, cache_dir)
    elif name == "domainnet":
        arrays, meta = read_domainnet(data_dir, cache_dir)
    else:
        source = "emnist_balanced" if name == "emnist_45" else name
        folder = prepared_folder(source, data_dir)
        arrays, meta = cached_arrays(
            source, fingerprint(folder), lambda: read_prepared(source, folder), cache_dir
        )
        if name == "emnist_45":
            arrays, meta = first_45_classes(arrays, meta)
    mean, std = normalisation_constants(name, normalisation, arrays["train_images"])
    return dataset_from_arrays(
        **arrays,
        name=name,
        num_classes=len(meta["class_names"]),
        mean=mean,
        std=std,
        class_names=meta["class_names"],
        domain_names=meta.get("domain_names", ()),
        note=meta.get("note", ""),
    )


def _read_cinic10(data_dir, cache_dir):
    root = data_dir or os.environ.get("CINIC10_DIR")
    if not root or not Path(root).expanduser().is_dir():
        raise ConfigError(
            f"dataset = 'cinic10': no folder {str(root)!r}; unpack CINIC-10.tar.gz "
            "(https://datashare.ed.ac.uk/handle/10283/3192) and set CINIC10_DIR (or data_dir) "
            "to the folder that holds its train/ and test/"
        )
    return read_image_folder(Path(root).expanduser(), key="cinic10", cache_dir=cache_dir)
