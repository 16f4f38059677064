"""Data that a method has synthesized, as a file that other code can train on."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_het.runtime.trained_model import InputSpec
from fedjax_het.utils.arrays import save_arrays
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_fields
from fedjax_het.utils.io import write_atomically


@accept_former_fields(FORMER_INPUT_NAMES)
class SyntheticDataset(NamedTuple):
    """Synthetic inputs with their labels; M inputs, C channels or features.

    `Result.synthetic_dataset` returns it.

    Example:
      >>> from fedjax_het import RunSpec, simulate
      >>> settings = {"num_clients": 2, "rounds": 1, "options": {"steps": 1, "ipc": 1}}
      >>> spec = RunSpec("feddm", "digits", model="mlp", **settings)
      >>> data = simulate(spec).synthetic_dataset()
      >>> len(data.inputs) == len(data.labels), data.inputs.shape[1:]
      (True, (8, 8, 1))
    """

    inputs: np.ndarray
    """Inputs in the scale of the data, for images [0, 1] without clipping, float32 `[M, ...]`.

    The network receives `(inputs - mean) / std`.
    """
    labels: np.ndarray
    """Class with the highest probability, int64 `[M]`."""
    soft_labels: np.ndarray
    """Probabilities of the classes, float32 `[M, classes]`."""
    mean: np.ndarray
    """Mean of each channel or feature for the normalization, float32 `[C]`."""
    std: np.ndarray
    """Standard deviation of each channel or feature for the normalization, float32 `[C]`."""
    class_names: np.ndarray
    """Names of the classes, `[classes]`, or `[0]` without names."""
    step_size: np.ndarray
    """Learning rate of SGD if the method learns it (DynaFed), otherwise NaN; float32."""
    clients: np.ndarray
    """Client that synthesized each input, int64 `[M]`; -1 for the server."""

    @validate_arguments
    def save(self, path: str | os.PathLike) -> Path:
        """Write the arrays to a plain .npz file, `inputs` under the name `images`.

        Args:
          path: file to write.

        Returns:
          The path.

        Raises:
          OSError: if the file cannot be written; no partial file is left behind.
        """
        path = Path(path)
        # Files have the name of version 0.6, which programs of users read.
        arrays = {"images": self.inputs, **self._asdict()}
        del arrays["inputs"]
        write_atomically(path, lambda file: save_arrays(file, arrays, compressed=True))
        return path


def require_synthetic_data(artifacts: Mapping[str, np.ndarray], method: str) -> None:
    """Raise ConfigError unless a run has synthetic data.

    Args:
      artifacts: artifacts of the run.
      method: name of the method, for the message.
    """
    if not {"synthetic_images", "condensed_images"} & artifacts.keys():
        raise ConfigError(
            f"{method} synthesizes no data: expected a result of dynafed, feddm or fedaf"
        )


def build_synthetic_dataset(
    artifacts: Mapping[str, np.ndarray], input_spec: InputSpec
) -> SyntheticDataset:
    """Return the synthetic data among the artifacts of a run.

    Args:
      artifacts: artifacts of the run: the set of the server (DynaFed), or the sets of all clients
        in the last round (FedDM, FedAF).
      input_spec: the properties of the data.

    Returns:
      The inputs in the scale of the data.
    """
    from scipy.special import softmax

    if "synthetic_images" in artifacts:
        inputs, step_size = artifacts["synthetic_images"], artifacts["synthetic_step_size"]
        soft_labels = softmax(np.asarray(artifacts["synthetic_label_logits"], np.float64), axis=1)
        clients = np.full(len(soft_labels), -1, np.int64)
    else:
        inputs, step_size = artifacts["condensed_images"], np.array(np.nan)
        inputs_per_pair = inputs.shape[1]  # of a client and a class
        inputs = inputs.reshape(-1, *inputs.shape[2:])
        classes = np.repeat(artifacts["condensed_classes"], inputs_per_pair)
        soft_labels = np.eye(input_spec.num_classes)[classes]
        clients = np.repeat(artifacts["condensed_clients"], inputs_per_pair).astype(np.int64)
    mean, std = (np.asarray(v, np.float32) for v in (input_spec.mean, input_spec.std))
    return SyntheticDataset(
        np.asarray(inputs, np.float32) * std + mean,
        soft_labels.astype(np.float32).argmax(1),
        soft_labels.astype(np.float32),
        mean,
        std,
        np.array(input_spec.class_names, str),
        np.asarray(step_size, np.float32),
        clients,
    )
