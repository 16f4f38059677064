"""A trained network by itself: what it predicts, how good it is, and a file that holds it all.

The models of a run whose state was kept in a file.
"""

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

from fedjax_het.algorithms.base import State
from fedjax_het.config.resolve import USER_PROVIDED
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset
from fedjax_het.data.validation import require_labels_below, validate_images, validate_labels
from fedjax_het.metrics.registry import (
    calibration_error,
    class_fractions,
    macro_f1,
    reliability_bins,
)
from fedjax_het.nn import compute_network_digest
from fedjax_het.runtime.checkpoint_file import load_checkpoint, read_checkpoint_record
from fedjax_het.runtime.compiled_programs import (
    Signature,
    build_algorithm,
    build_signature,
)
from fedjax_het.utils.arrays import fetch_to_host
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.io import DamagedFileError, write_atomically
from fedjax_het.utils.text import to_one_line

BATCH_SIZE = 500  # images at a time
FORMAT_VERSION = 1


class InputSpec(NamedTuple):
    """What a network was trained to see, and to tell apart."""

    dataset: str
    input_shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> "InputSpec":
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
    def from_record(cls, record: dict[str, Any]) -> "InputSpec":
        """From a file's record, which has lists."""
        tuples: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record.items()
        }
        return cls(**tuples)


class Evaluation(NamedTuple):
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
        return np.asarray(class_fractions(jnp.asarray(self.confusion, jnp.float32), 1))

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

    spec: ResolvedRunSpec
    input_spec: InputSpec
    variables: Any
    client: int | None
    task: Task
    network_digest: str | None = None

    def logits(self, images: np.ndarray) -> np.ndarray:
        """[N, C] float32. Cost: one compilation, then a pass of the network."""
        images = self._validate_images(images)
        logits_batches = []
        for start in range(0, len(images), BATCH_SIZE):
            batch = images[start : start + BATCH_SIZE]
            num_padding = min(BATCH_SIZE, len(images)) - len(batch)
            batch = np.concatenate([batch, np.zeros((num_padding, *batch.shape[1:]), batch.dtype)])
            logits = self._forward(self.variables, batch)
            logits_batches.append(np.asarray(logits)[: len(images) - start])
        return np.concatenate(logits_batches)

    def predict(self, images: np.ndarray) -> np.ndarray:
        """[N] int: the class of the largest logit; `inputs.class_names` says what it is."""
        return self.logits(images).argmax(1)

    def evaluate(self, images: np.ndarray, labels: np.ndarray) -> Evaluation:
        """On labelled images."""
        images = self._validate_images(images)
        labels = validate_labels("labels", labels, "images", images)
        require_labels_below("labels", labels, self.input_spec.num_classes)
        logits_float32 = self.logits(images)
        bins = reliability_bins(
            jnp.asarray(logits_float32), jnp.asarray(labels), jnp.ones(len(logits_float32))
        )
        logits = logits_float32.astype(np.float64)
        is_finite = bool(np.isfinite(logits).all())
        shifted = logits - logits.max(1, keepdims=True)
        log_sums = np.log(np.exp(shifted).sum(1))
        losses = log_sums - shifted[np.arange(len(labels)), labels]
        confusion = np.zeros((self.input_spec.num_classes,) * 2, np.int64)
        np.add.at(confusion, (labels, logits.argmax(1)), 1)
        accuracy = confusion.trace() / len(labels) if is_finite else float("nan")
        error = float(calibration_error(bins))
        return Evaluation(float(accuracy), float(losses.mean()), confusion, error)

    def save(self, path: str | Path) -> Path:
        """Write it to one file, whole or not at all, in flax's msgpack, with a checksum: settings,
        normalisation and classes besides the parameters. Returns the path. Raises OSError."""
        variables = serialization.msgpack_serialize(jax.tree.map(fetch_to_host, self.variables))
        record = {
            "spec": self.spec.to_dict(),
            "inputs": self.input_spec._asdict(),
            "client": self.client,
            "network_digest": self.network_digest,
        }
        content = {
            "fedjax_het_model": FORMAT_VERSION,
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
            return task.model.apply(variables, task.normalize(jnp.asarray(images)), train=False)[0]

        return jax.jit(forward)

    def _validate_images(self, images: np.ndarray) -> np.ndarray:
        images = validate_images("images", np.asarray(images))
        shape = self.input_spec.input_shape
        is_valid = images.shape[1:] == shape and len(images) > 0
        require(
            is_valid, "images", f"of shape {images.shape}", f"[N, {', '.join(map(str, shape))}]"
        )
        return images

    def __repr__(self) -> str:
        owner = "the global model" if self.client is None else f"the model of client {self.client}"
        return (
            f"TrainedModel({self.spec.model} for {self.input_spec.input_shape} images of "
            f"{self.input_spec.num_classes} classes, {owner} of {self.spec.algorithm} on "
            f"{self.input_spec.dataset})"
        )


def extract_model(
    signature: Signature,
    spec: ResolvedRunSpec,
    input_spec: InputSpec,
    state: Any,
    hp: Any,
    client: int | None = None,
) -> TrainedModel:
    """Return the global model of a federation's final state, or the model of a client.

    Args:
      signature: the static choices of the run.
      spec: its settings.
      input_spec: the data that the network reads.
      state: the final state of the federation.
      hp: its hyper-parameters, as programs read them.
      client: id of the client (default: the global model).

    Raises:
      ConfigError: for a client of a method whose clients share the global model, and for the global
        model of a method that has none.
    """
    algorithm, task = build_algorithm(signature), signature.training.task
    if client is None:
        get_global_model = algorithm.global_model
        require(
            get_global_model is not None,
            "client",
            client,
            f"0 to {spec.num_clients - 1}: {spec.algorithm} has no global model",
        )
        assert get_global_model is not None
        variables = get_global_model(state)
    else:
        is_available = algorithm.personal_variables is not None and 0 <= client < spec.num_clients
        expected = f"0 to {spec.num_clients - 1}"
        if algorithm.personal_variables is None:
            expected = f"None: clients of {spec.algorithm} have no models of their own"
        require(is_available, "client", client, expected)
        assert algorithm.personal_variables is not None
        variables = algorithm.personal_variables(hp, state, jnp.int32(client))
        task = task._replace(model=algorithm.personal_model or task.model)
    digest = compute_network_digest(signature.network) if spec.model == USER_PROVIDED else None
    variables = jax.tree.map(fetch_to_host, variables)
    return TrainedModel(spec, input_spec, variables, client, task, digest)


def build_signature_from_file(
    spec: ResolvedRunSpec,
    input_spec: InputSpec,
    network: Any,
    digest: str | None,
    optimizer: Any = None,
) -> Signature:
    """Of a run that is read from a file: with the network that the user passes, if it was the
    user's own, of this digest. Raises ConfigError for one that is missing, or another."""
    needs_user_network = spec.model == USER_PROVIDED
    expected = (
        "the network that it was trained with"
        if needs_user_network
        else "none, as the model names its own"
    )
    require((network is not None) == needs_user_network, "network", network, expected)
    dataset_like: Any = input_spec  # of a data set, all that is read
    signature = build_signature(spec, dataset_like, network, optimizer)
    if needs_user_network:
        is_same_network = compute_network_digest(signature.network) == digest
        require(
            is_same_network,
            "network",
            network,
            "the network that it was trained with, and its options",
        )
    return signature


class ModelFile(NamedTuple):
    """What a model's file holds."""

    spec: RunSpec
    input_spec: InputSpec
    variables: Any
    client: int | None
    network_digest: str | None
    variables_digest: str  # of the variables


def read_model_file(path: Path) -> ModelFile:
    """The file that `TrainedModel.save` wrote. Raises FileNotFoundError, and DamagedFileError, in
    one line, for a file that is none or is not as it was written."""
    text = path.read_bytes()
    try:
        content = serialization.msgpack_restore(text)
        if content["sha256"] != hashlib.sha256(content["variables"]).hexdigest():
            raise DamagedFileError("its checksum is another")
        record = json.loads(content["record"])
        return ModelFile(
            RunSpec.from_dict(record["spec"]),
            InputSpec.from_record(record["inputs"]),
            serialization.msgpack_restore(content["variables"]),
            record["client"],
            record["network_digest"],
            content["sha256"],
        )
    except Exception as error:  # of arbitrary bytes
        reason = (
            str(error)
            if isinstance(error, ConfigError | DamagedFileError)
            else type(error).__name__
        )
        message = (
            f"model = {str(path)!r}: expected a model of this program, but it is damaged ({reason})"
        )
        raise DamagedFileError(to_one_line(message)) from error


@validate_arguments
def load_model(path: str | Path, *, network: Any = None) -> TrainedModel:
    """The model that `TrainedModel.save` wrote.

    Args:
      network: the user's own, as it was given to the run; for models of such networks alone.
    Raises: FileNotFoundError; DamagedFileError, in one line, for a file that is none or is not as
      it was written; ConfigError for a network that is missing, or another one.
    """
    model_file = read_model_file(Path(path))
    spec = model_file.spec.resolved()
    signature = build_signature_from_file(
        spec, model_file.input_spec, network, model_file.network_digest
    )
    task = signature.training.task
    if model_file.client is not None:
        task = task._replace(model=build_algorithm(signature).personal_model or task.model)
    return TrainedModel(
        spec,
        model_file.input_spec,
        model_file.variables,
        model_file.client,
        task,
        model_file.network_digest,
    )


@validate_arguments
def evaluate(
    model: TrainedModel, dataset: Dataset, *, split: Literal["test", "train"] = "test"
) -> Evaluation:
    """How good a model is on a data set's test images, or those of training. Raises ConfigError for
    images of another shape or another number of classes."""
    num_classes = model.input_spec.num_classes
    is_valid = dataset.num_classes == num_classes
    require(
        is_valid, "num_classes of dataset", dataset.num_classes, f"{num_classes}, as the model has"
    )
    images, labels = (getattr(dataset, f"{split}_{part}") for part in ("images", "labels"))
    return model.evaluate(images, labels)


def load_state_model(
    path: Path, client: int | None = None, *, network: Any = None, optimizer: Any = None
) -> TrainedModel:
    """The global model of a run that was written to a file as it ended, or that of a client.

    network, optimizer: the user's own, as they were given to the run. Raises DamagedFileError;
    ConfigError as `load_model` does. Cost: reading the states of all clients.
    """
    record = read_checkpoint_record(path)
    spec, input_spec = (
        RunSpec.from_dict(record["spec"]).resolved(),
        InputSpec.from_record(record["inputs"]),
    )
    has_user_optimizer = spec.local_optimizer == USER_PROVIDED
    expected = (
        "the optimizer that the run had" if has_user_optimizer else "none, as the run names its own"
    )
    require((optimizer is not None) == has_user_optimizer, "optimizer", optimizer, expected)
    digest = record.get("network_digest")
    signature = build_signature_from_file(spec, input_spec, network, digest, optimizer)
    hp = {name: np.float32(value) for name, value in spec.hp.items()}
    state = _load_state(path, record, signature, spec, hp)
    return extract_model(signature, spec, input_spec, state, hp, client)


def _load_state(
    path: Path, record: dict, signature: Signature, spec: ResolvedRunSpec, hp: dict[str, Any]
) -> State:
    """As it is in the file, which has the states of clients that were trained alone where they were
    on the host: then they have no models of their own."""
    key, num_stored_clients = make_stream_key(spec.seed, Stream.INIT), record["touched"]

    def init_state() -> State:
        variables = signature.training.task.model.init(key)
        return build_algorithm(signature).init(hp, key, variables, spec.num_clients)

    expected_state = jax.eval_shape(init_state)
    if num_stored_clients is not None:
        to_stored_rows = lambda a: jax.ShapeDtypeStruct((num_stored_clients, *a.shape[1:]), a.dtype)  # noqa: E731
        expected_state = expected_state._replace(
            clients=jax.tree.map(to_stored_rows, expected_state.clients)
        )
    (state,) = load_checkpoint(path, (expected_state,))
    return state
