"""Per-channel mean and standard deviation: the constants that each paper uses.

Sources:

* `dynafed`: the paper's public code, which uses the constants of CIFAR-10 for CIFAR-100 and MNIST's
  constants for Fashion-MNIST.
* `fedaf`: the public distribution-matching code that FedAF builds on. The paper itself states no
  constants, and that code has no DomainNet, for which the statistics of the training set are used,
  as for `dataset`.
* `fsl`: the paper states no constants and no code is public. Images scaled to [0, 1] are assumed,
  as for `unit`.
* `fedamp`: its appendix could not be read and no code is public. The statistics of the training set
  are assumed, as for `dataset`.
* `pfllib`: `dataset/generate_FashionMNIST.py` of PFLlib's public code.
"""

from typing import Any

from fedjax_het.data.dataset import compute_channel_statistics
from fedjax_het.utils.errors import ConfigError, display_name, require, require_name

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
    "dynafed": "constants of DynaFed's code (MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100, CINIC-10)",
    "fedaf": "constants of the code that FedAF builds on (MNIST, Fashion-MNIST, CIFAR-10, "
    "CIFAR-100); DomainNet: equals 'dataset'",
    "fedamp": "equals 'dataset', since the paper's constants could not be read",
    "fsl": "equals 'unit', since the paper states no constants",
    "pfllib": "images scaled to [-1, 1], as in PFLlib",
    "unit": "images scaled to [0, 1] without further normalization",
    "dataset": "mean and standard deviation of the training inputs",
}
"""Normalization presets by name, with their descriptions.

Example:
  >>> from fedjax_het.data import NORMALIZATIONS
  >>> list(NORMALIZATIONS)
  ['dynafed', 'fedaf', 'fedamp', 'fsl', 'pfllib', 'unit', 'dataset']
"""


def get_normalization_constants(
    dataset: str, preset: str | None, train_inputs: Any
) -> tuple[Any, Any]:
    """Return the normalization constants of a data set.

    Args:
      dataset: name of the data set.
      preset: one of `NORMALIZATIONS`. None: DynaFed's constants where it has them, the statistics
        of the training set elsewhere.
      train_inputs: training inputs, such as images `[N, H, W, C]`.

    Returns:
      `(mean, std)` of each channel, for images scaled to [0, 1]; for inputs of several arrays by
      name.

    Raises:
      ConfigError: if the preset is unknown, or has no constants for this data set.
    """
    if preset is None:
        preset = "dynafed" if dataset in _CONSTANTS["dynafed"] else "dataset"
    require_name("normalization", preset, NORMALIZATIONS)
    is_image = getattr(train_inputs, "ndim", 0) == 4
    expected = "'dataset' or no value, as the inputs are no images"
    require(is_image or preset == "dataset", "normalization", preset, expected)
    channels = train_inputs.shape[-1]
    if preset in ("unit", "fsl"):
        return (0.0,) * channels, (1.0,) * channels
    if preset == "pfllib":
        return (0.5,) * channels, (0.5,) * channels
    if preset in ("dataset", "fedamp"):
        return compute_channel_statistics(train_inputs)
    if dataset not in _CONSTANTS[preset]:
        raise ConfigError(
            f"{display_name('normalization')} = {preset!r} has no constants for {dataset!r}: "
            f"expected 'dataset' or 'unit' (it has {', '.join(_CONSTANTS[preset])})"
        )
    return _CONSTANTS[preset][dataset] or compute_channel_statistics(train_inputs)
