"""Cylinder-bell-funnel, artificial series of three classes (Saito, 1994), measured by devices."""

import numpy as np

# Never changed: another value would be another benchmark.
_SEED, _NUM_DEVICES, _LENGTH = 0, 20, 64
_NUM_EXAMPLES = {"train": 60, "test": 15}  # of each device
CLASS_NAMES = ("cylinder", "bell", "funnel")


def read_cylinder_bell_funnel(data_dir=None, cache_dir=None) -> tuple[dict[str, np.ndarray], dict]:
    """Draw 1,200 + 300 series of 64 values that 20 devices measure.

    A series is (6 + e) s(t) + n(t), where s is 0 outside an interval [a, b]. Inside, it is 1 for a
    cylinder, rises from 0 to 1 for a bell, and falls from 1 to 0 for a funnel. e and n(t) are
    N(0, 1). a is uniform on the second eighth of the series, and b - a is uniform between a quarter
    and three quarters of the series. A device multiplies the values by its own factor and adds its
    own offset.

    Args:
      data_dir: not used.
      cache_dir: not used.

    Returns:
      `(arrays, meta)`: series `[N, 64, 1]`, classes and devices of both splits by name, and class
      names.
    """
    rng = np.random.default_rng(_SEED)
    factors = np.exp(rng.normal(0, 0.3, _NUM_DEVICES))
    offsets = rng.normal(0, 1, _NUM_DEVICES)
    arrays = {}
    for split, count in _NUM_EXAMPLES.items():
        devices = np.repeat(np.arange(_NUM_DEVICES), count)
        labels = rng.integers(0, len(CLASS_NAMES), len(devices)).astype(np.int32)
        series = _draw_series(rng, labels)
        series = factors[devices, None] * series + offsets[devices, None]
        arrays[f"{split}_inputs"] = series[..., None].astype(np.float32)
        arrays[f"{split}_labels"] = labels
        arrays[f"{split}_users"] = np.array([f"device{device:02d}" for device in devices])
    note = f"artificial series that {_NUM_DEVICES} devices measure"
    return arrays, {"class_names": list(CLASS_NAMES), "note": note}


def _draw_series(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Return series `[N, 64]` of the classes `[N]`."""
    count, positions = len(labels), np.arange(_LENGTH)
    starts = rng.uniform(_LENGTH / 8, _LENGTH / 4, (count, 1))
    lengths = rng.uniform(_LENGTH / 4, 3 * _LENGTH / 4, (count, 1))
    progress = (positions - starts) / lengths
    is_inside = (progress >= 0) & (progress <= 1)
    shapes = np.stack([np.ones_like(progress), progress, 1 - progress])[labels, np.arange(count)]
    heights = 6 + rng.normal(size=(count, 1))
    return np.where(is_inside, heights * shapes, 0) + rng.normal(size=(count, _LENGTH))
