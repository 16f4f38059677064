"""The images that a run has made, as a file that other code can train on."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.runtime.trained_model import InputSpec
from fedjax_het.utils.arrays import save_arrays
from fedjax_het.utils.errors import require
from fedjax_het.utils.io import write_atomically


class SyntheticDataset(NamedTuple):
    """Synthetic images with their labels.

    images: `[M, H, W, C]` float32 in the scale of the data set's pixels ([0, 1]; not clipped): what
      a network sees is `(images - mean) / std`.
    labels: `[M]` int64, the likeliest class. soft_labels: `[M, classes]` float32 probabilities.
    mean, std: `[C]` of the normalisation. class_names: `[classes]` texts, or none.
    step_size: of SGD, where the method learns it (DynaFed), else NaN.
    clients: `[M]` int64, who made each; -1 for the server.
    """

    images: np.ndarray
    labels: np.ndarray
    soft_labels: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    class_names: np.ndarray
    step_size: np.ndarray
    clients: np.ndarray

    def save(self, path: str | Path) -> Path:
        """Write a plain .npz of these arrays, whole or not at all. Raises OSError."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: save_arrays(file, self._asdict(), compressed=True))
        return path


def build_synthetic_dataset(
    artifacts: dict[str, np.ndarray], input_spec: InputSpec, method: str
) -> SyntheticDataset:
    """What is among a run's artifacts: DynaFed's set, or all clients' of the last round (FedDM,
    FedAF). Raises ConfigError for a method that makes none."""
    if "synthetic_images" in artifacts:
        parts = _collect_server_images(artifacts)
    else:
        has_images = "condensed_images" in artifacts
        expected = "a method that makes images: dynafed, feddm or fedaf"
        require(has_images, "algorithm", method, expected)
        parts = _collect_client_images(artifacts, input_spec.num_classes)
    mean, std = (
        np.asarray(statistic, np.float32) for statistic in (input_spec.mean, input_spec.std)
    )
    images = np.asarray(parts["images"], np.float32) * std + mean
    soft_labels = np.asarray(parts["soft_labels"], np.float32)
    return SyntheticDataset(
        images,
        soft_labels.argmax(1),
        soft_labels,
        mean,
        std,
        np.array(input_spec.class_names, str),
        np.asarray(parts["step_size"], np.float32),
        parts["clients"],
    )


def _collect_server_images(artifacts: dict[str, np.ndarray]) -> dict[str, Any]:
    logits = np.asarray(artifacts["synthetic_label_logits"], np.float64)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return {
        "images": artifacts["synthetic_images"],
        "soft_labels": weights / weights.sum(1, keepdims=True),
        "step_size": artifacts["synthetic_step_size"],
        "clients": np.full(len(logits), -1, np.int64),
    }


def _collect_client_images(artifacts: dict[str, np.ndarray], num_classes: int) -> dict[str, Any]:
    images = artifacts["condensed_images"]  # [pairs of a client and a class, images of each, ...]
    images_per_pair = images.shape[1]
    classes = np.repeat(artifacts["condensed_classes"], images_per_pair)
    return {
        "images": images.reshape(-1, *images.shape[2:]),
        "soft_labels": np.eye(num_classes)[classes],
        "step_size": np.nan,
        "clients": np.repeat(artifacts["condensed_clients"], images_per_pair).astype(np.int64),
    }
