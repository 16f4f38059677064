"""Per-channel mean and standard deviation: which constants each paper uses.

Sources. `dynafed`: the paper's public code, which gives CIFAR-100 the constants of CIFAR-10 and
Fashion-MNIST those of MNIST. `fedaf`: the public distribution-matching code that FedAF builds on;
the paper itself states none, and that code has no DomainNet, for which the training set's own
statistics are taken, as `dataset`. `fsl`: the paper states none and no code is public; images
scaled to [0, 1] are assumed, as `unit`. `fedamp`: its appendix could not be read and no code is
public; the training set's own statistics are assumed, as `dataset`.
"""

import numpy as np

from fedjax_het.data.dataset import compute_channel_statistics
from fedjax_het.utils.errors import ConfigError, require_name

_MNIST = ((0.1307,), (0.3081,))
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))

_ChannelConstants = tuple[tuple[float, ...], tuple[float, ...]]

_CONSTANTS: dict[str, dict[str, _ChannelConstants | None]] = {
    "dynafed": {
        "mnist": _MNIST,
        "fashion_mnist": _MNIST,
        "cifar10": _CIFAR10,
        "cifar100": _CIFAR10,
        "cinic10": (
            (0.47889522, 0.47227842, 0.43047404),
            (0.24205776, 0.23828046, 0.25874835),
        ),
    },
    "fedaf": {
        "mnist": _MNIST,
        "fashion_mnist": ((0.2861,), (0.3530,)),
        "cifar10": _CIFAR10,
        "cifar100": ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)),
        "domainnet": None,  # as `dataset`
    },
}

NORMALIZATIONS = {
    "dynafed": "DynaFed's public code (MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100, CINIC-10)",
    "fedaf": "the code FedAF builds on (MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100); DomainNet: as "
    "'dataset'",
    "fedamp": "none could be read: as 'dataset'",
    "fsl": "none stated: as 'unit'",
    "unit": "images scaled to [0, 1], nothing else",
    "dataset": "mean and deviation of the training images",
}


def get_normalization_constants(
    dataset: str, preset: str | None, train_images: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`(mean, std)` per channel of images scaled to [0, 1], for a data set by name.

    `preset` is one of `NORMALIZATIONS`; None means DynaFed's constants where it has them and the
    training set's own statistics elsewhere. Raises `ConfigError` for an unknown preset, or one
    that has no constants for this data set.
    """
    if preset is None:
        preset = "dynafed" if dataset in _CONSTANTS["dynafed"] else "dataset"
    require_name("normalisation", preset, NORMALIZATIONS)
    if preset in ("unit", "fsl"):
        channels = train_images.shape[-1]
        return (0.0,) * channels, (1.0,) * channels
    if preset in ("dataset", "fedamp"):
        return compute_channel_statistics(train_images)
    if dataset not in _CONSTANTS[preset]:
        raise ConfigError(
            f"normalisation = {preset!r} has no constants for {dataset!r}: "
            f"expected 'dataset' or 'unit' (it knows {', '.join(_CONSTANTS[preset])})"
        )
    return _CONSTANTS[preset][dataset] or compute_channel_statistics(train_images)
