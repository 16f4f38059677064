"""A trained network by itself: what it predicts, how good it is, and a file that holds it all."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from fedjax_het.common.arrays import host_values
from fedjax_het.common.doors import door
from fedjax_het.common.errors import ConfigError, require
from fedjax_het.common.files import DamagedFileError, write_atomically
from fedjax_het.common.text import one_line
from fedjax_het.data import Dataset
from fedjax_het.data.checks import checked_images, checked_labels, require_below
from fedjax_het.engine.measured import calibration_error, class_shares, in_bins, macro_f1
from fedjax_het.engine.task import Task
from fedjax_het.nn import network_digest
from fedjax_het.running.programs import (
    Signature,
    algorithm_of,
    network_of,
    signature_of,
    training_of,
)
from fedjax_het.settings.layers import USER
from fedjax_het.settings.spec import ResolvedSpec, RunSpec

BATCH = 500  # images at a time
FORMAT = 1


class Inputs(NamedTuple):
    """What a network was trained to see, and to tell apart."""

    dataset: str
    input_shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]

    @classmethod
    def of(cls, dataset: Dataset) -> "Inputs":
        return cls(
            dataset.name,
            dataset.input_shape,
            dataset.num_classes,
            tuple(dataset.mean),
            tuple(dataset.std),
            tuple(dataset.class_names),
            tuple(dataset.domain_names),
        )

    @classmethod
    def read(cls, record: dict[str, Any]) -> "Inputs":
        """From a file's record, which has lists."""
        tuples: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record.items()
        }
        return cls(**tuples)


class Evaluated(NamedTuple):
    """How good a model is on some images."""

    accuracy: float
    """The share of which the largest logit is the label's; NaN where a logit is not finite."""
    loss: float
    """Mean cross-entropy in nats."""
    confusion: np.ndarray
    """[C, C] int: images by their class and by what was predicted."""
    calibration_error: float
    """Expected, in 15 bins of confidence (Guo et al., 2017); NaN where a logit is not finite."""

    @property
    def class_accuracy(self) -> np.ndarray:
        """[C]: of the images of each class; NaN for one without."""
        return np.asarray(class_shares(jnp.asarray(self.confusion, jnp.float32), 1))

    @property
    def macro_f1(self) -> float:
        """The unweighted mean of the F1 of the classes that are there or are predicted."""
        return float(macro_f1(jnp.asarray(self.confusion, jnp.float32)))


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A network with its parameters, the normalisation of its images, and its classes.

    spec: the run that it is of. client: whose model it is; None for the global one. `logits`,
    `predict` and `evaluate` take images `[N, H, W, C]`: uint8, or floats in [0, 1] (of data of
    floats, as those are).
    """

    spec: ResolvedSpec
    inputs: Inputs
    variables: Any
    client: int | None
    task: Task
    network_digest: str | None = None

    def logits(self, images: np.ndarray) -> np.ndarray:
        """[N, C] float32. Cost: one compilation, then a pass of the network."""
        images = self._checked(images)
        made = []
        for first in range(0, len(images), BATCH):
            part = images[first : first + BATCH]
            short = min(BATCH, len(images)) - len(part)
            part = np.concatenate([part, np.zeros((short, *part.shape[1:]), part.dtype)])
            logits = self._forward(self.variables, part)
            made.append(np.asarray(logits)[: len(images) - first])
        return np.concatenate(made)

    def predict(self, images: np.ndarray) -> np.ndarray:
        """[N] int: the class of the largest logit; `inputs.class_names` says what it is."""
        return self.logits(images).argmax(1)

    def evaluate(self, images: np.ndarray, labels: np.ndarray) -> Evaluated:
        """On labelled images."""
        images = self._checked(images)
        labels = checked_labels("labels", labels, "images", images)
        require_below("labels", labels, self.inputs.num_classes)
        found = self.logits(images)
        bins = in_bins(jnp.asarray(found), jnp.asarray(labels), jnp.ones(len(found)))
        logits = found.astype(np.float64)
        finite = bool(np.isfinite(logits).all())
        shifted = logits - logits.max(1, keepdims=True)
        log_sums = np.log(np.exp(shifted).sum(1))
        losses = log_sums - shifted[np.arange(len(labels)), labels]
        confusion = np.zeros((self.inputs.num_classes,) * 2, np.int64)
        np.add.at(confusion, (labels, logits.argmax(1)), 1)
        accuracy = confusion.trace() / len(labels) if finite else float("nan")
        error = float(calibration_error(bins))
        return Evaluated(float(accuracy), float(losses.mean()), confusion, error)

    def save(self, path: str | Path) -> Path:
        """Write it to one file, whole or not at all, in flax's msgpack, with a checksum: settings,
        normalisation and classes besides the parameters. Returns the path. Raises OSError."""
        variables = serialization.msgpack_serialize(jax.tree.map(host_values, self.variables))
        record = {
            "spec": self.spec.to_dict(),
            "inputs": self.inputs._asdict(),
            "client": self.client,
            "network_digest": self.network_digest,
        }
        content = {
            "fedjax_het_model": FORMAT,
            "record": json.dumps(record),
            "sha256": hashlib.sha256(variables).hexdigest(),
            "variables": variables,
        }
        text, path = serialization.msgpack_serialize(content), Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text))
        return path

    @functools.cached_property
    def _forward(self) -> Callable:
        task = self.task

        def forward(variables, images):
            return task.model.apply(variables, task.normalise(jnp.asarray(images)), train=False)[0]

        return jax.jit(forward)

    def _checked(self, images: np.ndarray) -> np.ndarray:
        images = checked_images("images", np.asarray(images))
        shape = self.inputs.input_shape
        fits = images.shape[1:] == shape and len(images) > 0
        require(fits, "images", f"of shape {images.shape}", f"[N, {', '.join(map(str, shape))}]")
        return images

    def __repr__(self) -> str:
        whose = "the global model" if self.client is None else f"the model of client {self.client}"
        return (
            f"TrainedModel({self.spec.model} for {self.inputs.input_shape} images of "
            f"{self.inputs.num_classes} classes, {whose} of {self.spec.algorithm} on "
            f"{self.inputs.dataset})"
        )


def trained_model(
    signature: Signature,
    spec: ResolvedSpec,
    inputs: Inputs,
    state: Any,
    hp: Any,
    client: int | None = None,
    *,
    network: Any = None,
    optimizer: Any = None,
) -> TrainedModel:
    """The global model of a federation's final state, or that of a client; `network` and
    `optimizer` are asked for where a state is read from a file.

    Raises ConfigError for a client of a method whose clients share the global model, and for the
    global model of a method that has none.
    """
    for name, own in (("network", network), ("optimizer", optimizer)):
        require(own is None, name, own, "none: the run has its own")
    algorithm, task = algorithm_of(signature), training_of(signature).task
    if client is None:
        get = algorithm.global_model
        require(
            get is not None,
            "client",
            client,
            f"0 to {spec.num_clients - 1}: {spec.algorithm} has no global model",
        )
        assert get is not None
        variables = get(state)
    else:
        known = algorithm.personal is not None and 0 <= client < spec.num_clients
        expected = f"0 to {spec.num_clients - 1}"
        if algorithm.personal is None:
            expected = f"None: clients of {spec.algorithm} have no models of their own"
        require(known, "client", client, expected)
        assert algorithm.personal is not None
        variables = algorithm.personal(hp, state, jnp.int32(client))
        task = task._replace(model=algorithm.personal_model or task.model)
    digest = network_digest(network_of(signature)) if signature.model == USER else None
    variables = jax.tree.map(host_values, variables)
    return TrainedModel(spec, inputs, variables, client, task, digest)


def signature_with(
    spec: ResolvedSpec, inputs: Inputs, network: Any, digest: str | None, optimizer: Any = None
) -> Signature:
    """Of a run that is read from a file: with the network that the user passes, if it was the
    user's own, of this digest. Raises ConfigError for one that is missing, or another."""
    asks = spec.model == USER
    expected = (
        "the network that it was trained with" if asks else "none, as the model names its own"
    )
    require((network is not None) == asks, "network", network, expected)
    read: Any = inputs  # of a data set, all that is read
    signature = signature_of(spec, read, network, optimizer)
    if asks:
        same = network_digest(network_of(signature)) == digest
        require(same, "network", network, "the network that it was trained with, and its options")
    return signature


class KeptModel(NamedTuple):
    """What a model's file holds."""

    spec: RunSpec
    inputs: Inputs
    variables: Any
    client: int | None
    network_digest: str | None
    digest: str  # of the variables


def read_model(path: Path) -> KeptModel:
    """The file that `TrainedModel.save` wrote. Raises FileNotFoundError, and DamagedFileError, in
    one line, for a file that is none or is not as it was written."""
    text = path.read_bytes()
    try:
        content = serialization.msgpack_restore(text)
        if content["sha256"] != hashlib.sha256(content["variables"]).hexdigest():
            raise DamagedFileError("its checksum is another")
        record = json.loads(content["record"])
        return KeptModel(
            RunSpec.from_dict(record["spec"]),
            Inputs.read(record["inputs"]),
            serialization.msgpack_restore(content["variables"]),
            record["client"],
            record["network_digest"],
            content["sha256"],
        )
    except Exception as error:  # of arbitrary bytes
        what = (
            str(error)
            if isinstance(error, ConfigError | DamagedFileError)
            else type(error).__name__
        )
        said = (
            f"model = {str(path)!r}: expected a model of this program, but it is damaged ({what})"
        )
        raise DamagedFileError(one_line(said)) from error


@door
def load_model(path: str | Path, *, network: Any = None) -> TrainedModel:
    """The model that `TrainedModel.save` wrote.

    Args:
      network: the user's own, as it was given to the run; for models of such networks alone.
    Raises: FileNotFoundError; DamagedFileError, in one line, for a file that is none or is not as
      it was written; ConfigError for a network that is missing, or another one.
    """
    kept = read_model(Path(path))
    spec = kept.spec.resolved()
    signature = signature_with(spec, kept.inputs, network, kept.network_digest)
    task = training_of(signature).task
    if kept.client is not None:
        task = task._replace(model=algorithm_of(signature).personal_model or task.model)
    return TrainedModel(spec, kept.inputs, kept.variables, kept.client, task, kept.network_digest)


@door
def evaluate(
    model: TrainedModel, dataset: Dataset, *, split: Literal["test", "train"] = "test"
) -> Evaluated:
    """How good a model is on a data set's test images, or those of training. Raises ConfigError for
    images of another shape or another number of classes."""
    classes = model.inputs.num_classes
    fits = dataset.num_classes == classes
    require(fits, "num_classes of dataset", dataset.num_classes, f"{classes}, as the model has")
    images, labels = (getattr(dataset, f"{split}_{what}") for what in ("images", "labels"))
    return model.evaluate(images, labels)
