"""Trained networks: predictions, evaluation, and files."""

import functools
import hashlib
import json
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from fedjax_het.config.resolve import USER_PROVIDED
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset
from fedjax_het.data.validation import (
    MAX_UINT16,
    UINT16_TYPES,
    InputValidator,
    validate_images,
    validate_inputs,
)
from fedjax_het.metrics.registry import (
    calibration_error,
    class_fractions,
    macro_f1,
    reliability_bins,
)
from fedjax_het.nn import compute_network_digest
from fedjax_het.runtime.compiled_programs import build_algorithm
from fedjax_het.runtime.name_matching import match_names
from fedjax_het.runtime.signature import Signature, build_signature
from fedjax_het.tasks import TASKS, TaskKind
from fedjax_het.tasks.checks import convert_labels, make_kind
from fedjax_het.utils.array_validation import require_below, validate_labels
from fedjax_het.utils.arrays import fetch_to_host, make_key
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.env import require_devices
from fedjax_het.utils.errors import (
    ConfigError,
    display_name,
    display_names,
    make_value_error,
    require,
)
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_arguments
from fedjax_het.utils.input_kinds import (
    FrozenMapping,
    InputShape,
    NumTokens,
    count_rows,
    map_arrays,
)
from fedjax_het.utils.io import DamagedFileError, write_atomically
from fedjax_het.utils.text import to_one_line

BATCH_SIZE = 500
"""Number of examples in a forward pass."""
FORMAT_VERSION = 1
"""Version of the files of models."""
INPUT_SCALES = {"uint8": 255.0, "uint16": float(MAX_UINT16), "float32": 1.0, "int32": 1.0}
"""Number by which inputs are divided, by the type of the training inputs."""
_EXPECTED_IMAGES = {
    "uint8": "integers in 0..255, or floats in [0, 1]",
    "uint16": "uint16, uint8, or floats in [0, 1]",
    "float32": "floats in the scale of the training images",
}
_MAX_ROUNDING = 1e-3  # excess over [0, 1] of images of floats


class InputSpec(NamedTuple):
    """The properties of a data set that a network depends on.

    Example:
      >>> from fedjax_het import load_dataset
      >>> from fedjax_het.runtime.trained_model import InputSpec
      >>> InputSpec.from_dataset(load_dataset("digits")).input_shape
      (8, 8, 1)
    """

    dataset: str
    """Name of the data set."""
    input_shape: InputShape
    """Shape of the input of one example, such as (H, W, C) of an image; or shapes by name."""
    num_classes: int
    """Number of classes."""
    mean: Any
    """Mean of each channel or feature, which is subtracted; of images in [0, 1]."""
    std: Any
    """Standard deviation of each channel or feature, by which inputs are divided."""
    class_names: tuple[str, ...]
    """Names of the classes, if they have names."""
    domain_names: tuple[str, ...]
    """Names of the domains of the data, if there are any."""
    dtype: str | None = None
    """Type of the training inputs: "uint8", "uint16" or "float32", or "int32" for tokens. None if
    the file does not contain it (version 0.6.0): the model accepts integers in 0..255, and floats
    in the scale of the data."""
    scale: float | None = None
    """Number by which inputs of that type are divided: 255, 65535 or 1; None if it is unknown."""
    layout: str = "NHWC"
    """Order of the axes of images."""
    num_tokens: NumTokens = None
    """Number of different tokens; None for inputs of floats."""
    task: str = "classification"
    """Kind of the task."""
    num_outputs: int = 0
    """Number of outputs of the network."""
    label_shape: tuple[int, ...] = ()
    """Shape of the label of one example."""
    label_dtype: str = "int32"
    """Type of the labels."""
    feature_names: Any = ()
    """Name of each feature, or (); names by the name of the array for several arrays."""
    token_names: Any = ()
    """Text of each token or category, or (); texts by the name of the array for several arrays."""

    @property
    def task_kind(self) -> TaskKind:
        """The kind of the task, without the constants of the data set."""
        return TASKS.require(self.task).make()

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> "InputSpec":
        """Return the properties of a data set."""
        names: tuple[str, ...] = ("input_shape", "num_classes", "mean", "std")
        names += ("class_names", "domain_names")
        names += ("num_tokens", "task", "num_outputs", "label_shape", "label_dtype")
        names += ("feature_names", "token_names")
        values = {name: getattr(dataset, name) for name in names}
        if dataset.input_kind != "mixed":
            dtype = str(dataset.train_inputs.dtype)
            if dataset.is_16_bit and dtype == "float32":
                dtype = "uint16"
            values |= {"dtype": dtype, "scale": INPUT_SCALES[dtype]}
        return cls.from_record({"dataset": dataset.name, **values})

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "InputSpec":
        """Return the properties that the record of a file contains; lists become tuples."""

        def freeze(value: Any) -> Any:
            if isinstance(value, Mapping):
                return FrozenMapping({name: freeze(part) for name, part in value.items()})
            return tuple(value) if isinstance(value, list | tuple) else value

        values = {name: freeze(value) for name, value in record.items()}
        return cls(**{"num_outputs": values["num_classes"], **values})

    def to_record(self) -> dict[str, Any]:
        """Return the properties for the record of a file."""
        values = self._asdict().items()
        return {n: dict(value) if isinstance(value, Mapping) else value for n, value in values}


class TaskEvaluation(NamedTuple):
    """Quality of a model of a task without classes on labeled examples.

    Example:
      >>> from fedjax_het.runtime.trained_model import TaskEvaluation
      >>> TaskEvaluation(score=0.9, loss=0.4, score_name="R2").score
      0.9
    """

    score: float
    """Mean score of the task; NaN if an output is not finite."""
    loss: float
    """Mean loss of the task."""
    score_name: str
    """Name of the score, such as "R2"."""


class Evaluation(NamedTuple):
    """Quality of a model on labeled examples with classes.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.runtime.trained_model import Evaluation
      >>> confusion = np.array([[3, 1], [0, 4]])
      >>> Evaluation(0.875, 0.4, confusion, calibration_error=0.1).class_accuracy.tolist()
      [0.75, 1.0]
    """

    accuracy: float
    """Fraction of examples whose label has the largest logit; NaN if a logit is not finite."""
    loss: float
    """Mean cross-entropy in nats."""
    confusion: np.ndarray
    """Number of examples by class and predicted class, int64 `[classes, classes]`."""
    calibration_error: float
    """Expected calibration error in 15 bins (Guo et al., 2017); NaN if a logit is not finite."""

    @property
    def class_accuracy(self) -> np.ndarray:
        """Accuracy on the examples of each class, float32 `[classes]`; NaN without examples."""
        return np.asarray(class_fractions(jnp.asarray(self.confusion, jnp.float32), 1))

    @property
    def macro_f1(self) -> float:
        """Unweighted mean of the F1 scores of the classes that occur or are predicted."""
        return float(macro_f1(jnp.asarray(self.confusion, jnp.float32)))


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A network with its parameters and the normalization of its inputs.

    Methods accept images `[N, H, W, C]`: uint8, other integers in 0..255, or floats in [0, 1]. A
    model of 16-bit images accepts uint16, uint8, and floats in [0, 1]. A model of floats accepts
    floats in the scale of the training inputs: images, features `[N, F]` or series `[N, T, F]`. A
    model of tokens accepts integers `[N, T]`.

    Attributes:
      spec: settings of the run.
      input_spec: the properties of the data.
      variables: parameters and statistics of the network, on the host.
      client: id of the client whose model it is; None for the global model.
      task: the network and the normalization.
      network_digest: digest of a network of the user, otherwise None.

    Example:
      >>> from fedjax_het import RunSpec, load_dataset, simulate
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=2, rounds=1)
      >>> model = simulate(spec).model()
      >>> model.predict(load_dataset("digits").test_inputs).shape
      (359,)
    """

    spec: ResolvedRunSpec
    input_spec: InputSpec
    variables: Any
    client: int | None
    task: Task
    network_digest: str | None = None

    @accept_former_arguments("TrainedModel.logits", FORMER_INPUT_NAMES)
    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """Return the logits of inputs; the first call compiles a program.

        Args:
          inputs: images `[N, H, W, C]` or other inputs, see the class.

        Returns:
          Logits `[N, classes]`: float32, or the type that a network of the user returns.

        Raises:
          ConfigError: for inputs of another shape, type or scale.
        """
        require_devices()
        inputs = self._validate_inputs(inputs)
        batches = []
        num_examples = count_rows(inputs)

        def take(start: int, array: np.ndarray) -> np.ndarray:
            batch = array[start : start + BATCH_SIZE]
            num_padding = min(BATCH_SIZE, num_examples) - len(batch)
            return np.concatenate([batch, np.zeros((num_padding, *batch.shape[1:]), batch.dtype)])

        for start in range(0, num_examples, BATCH_SIZE):
            batch = map_arrays(functools.partial(take, start), inputs)
            num_real = min(BATCH_SIZE, num_examples - start)
            batches.append(np.asarray(self._forward(self.variables, batch))[:num_real])
        return np.concatenate(batches)

    @accept_former_arguments("TrainedModel.predict", FORMER_INPUT_NAMES)
    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Return the class of the largest logit of each example, or the predictions of the task.

        Args:
          inputs: images `[N, H, W, C]` or other inputs, see the class.

        Returns:
          Classes, int64 `[N]`; for other tasks see `TaskKind.predict`.

        Raises:
          ConfigError: for inputs of another shape, type or scale.
        """
        return self.task.kind.predict(self.logits(inputs))

    @accept_former_arguments("TrainedModel.evaluate", FORMER_INPUT_NAMES)
    def evaluate(self, inputs: np.ndarray, labels: np.ndarray) -> Evaluation | TaskEvaluation:
        """Evaluate the model on labeled examples.

        Args:
          inputs: images `[N, H, W, C]` or other inputs, see the class.
          labels: class of each example, `[N]`, or labels of the task.

        Returns:
          Accuracy, loss, confusion matrix and calibration error; score and loss for a task without
          classes.

        Raises:
          ConfigError: for inputs of another shape, type or scale, and for unknown classes.
        """
        from scipy.special import log_softmax

        inputs = self._validate_inputs(inputs)
        if not self.task.kind.has_classes:
            return self._evaluate_task(inputs, labels)
        labels = validate_labels("labels", labels, "inputs", inputs)
        require_below("labels", labels, self.input_spec.num_classes)
        logits = self.logits(inputs)
        bins = reliability_bins(jnp.asarray(logits), jnp.asarray(labels), jnp.ones(len(logits)))
        log_probabilities = log_softmax(logits.astype(np.float64), axis=1)
        loss = -log_probabilities[np.arange(len(labels)), labels].mean()
        confusion = np.zeros((self.input_spec.num_classes,) * 2, np.int64)
        np.add.at(confusion, (labels, logits.argmax(1)), 1)
        is_finite = np.isfinite(logits).all()
        accuracy = confusion.trace() / len(labels) if is_finite else np.nan
        return Evaluation(float(accuracy), float(loss), confusion, float(calibration_error(bins)))

    def _evaluate_task(self, inputs: np.ndarray, labels: np.ndarray) -> TaskEvaluation:
        labels = convert_labels(type(self.task.kind), "labels", labels, "inputs", inputs)
        kind = make_kind(type(self.task.kind), labels)
        data = jnp.asarray(self.logits(inputs)), jnp.asarray(labels)
        weights = kind.count_targets(data[1])
        score, loss = (
            float((values * weights).sum() / weights.sum())
            for values in (kind.compute_scores(*data), kind.compute_losses(*data))
        )
        return TaskEvaluation(score, loss, kind.score_name)

    @validate_arguments
    def save(self, path: str | os.PathLike) -> Path:
        """Write the model to a file for `load_model`, in msgpack with a checksum.

        Args:
          path: file to write.

        Returns:
          The path.

        Raises:
          OSError: if the file cannot be written; no partial file is left behind.
        """
        variables = serialization.msgpack_serialize(jax.tree.map(fetch_to_host, self.variables))
        record = {
            "spec": self.spec.to_dict(),
            "inputs": self.input_spec.to_record(),
            "client": self.client,
            "network_digest": self.network_digest,
        }
        content = {
            "fedjax_het_model": FORMAT_VERSION,
            "record": json.dumps(record),
            "sha256": hashlib.sha256(variables).hexdigest(),
            "variables": variables,
        }
        path = Path(path)
        data = serialization.msgpack_serialize(content)
        write_atomically(path, operator.methodcaller("write", data))
        return path

    @functools.cached_property
    def _forward(self) -> Callable:
        task = self.task

        def forward(variables, inputs):
            inputs = jax.tree.map(jnp.asarray, inputs)
            return task.model.apply(variables, task.normalize(inputs), train=False)[0]

        return jax.jit(forward)

    def _validate_inputs(self, inputs: Any) -> Any:
        spec = self.input_spec
        if isinstance(spec.input_shape, FrozenMapping):
            validator = InputValidator(spec.num_tokens, are_features=True)
            arrays = validator.validate("inputs", inputs)
            for name, array in arrays.items():
                shape, expected = array.shape[1:], f"[N, *{spec.input_shape[name]}]"
                is_valid = shape == spec.input_shape[name]
                require(is_valid, f"shape of inputs[{name!r}]", array.shape, expected)
            return arrays
        inputs = np.asarray(inputs)
        is_valid = inputs.shape[1:] == spec.input_shape and len(inputs) > 0
        expected = f"[N, {', '.join(map(str, spec.input_shape))}]"
        expected += f", in the layout {spec.layout}" if len(spec.input_shape) == 3 else ""
        require(is_valid, "inputs", f"of shape {inputs.shape}", expected)
        if len(spec.input_shape) != 3:
            return validate_inputs("inputs", inputs, num_tokens=spec.num_tokens, are_features=True)
        dtype = spec.dtype
        if dtype is not None:
            is_integer = np.issubdtype(inputs.dtype, np.integer)
            is_accepted = (
                not is_integer
                or {
                    "uint8": inputs.dtype not in UINT16_TYPES or inputs.max() <= 255,
                    "uint16": inputs.dtype in (np.uint8, *UINT16_TYPES),
                    "float32": False,
                }[dtype]
            )
            expected = f"{_EXPECTED_IMAGES[dtype]}, as the training images are {dtype}"
            require(is_accepted, "dtype of inputs", str(inputs.dtype), expected)
        inputs = validate_images("inputs", inputs, is_16_bit=dtype == "uint16")
        if dtype in ("uint8", "uint16") and inputs.dtype == np.float32:
            low, high = float(inputs.min()), float(inputs.max())
            is_scaled = low >= -_MAX_ROUNDING and high <= 1 + _MAX_ROUNDING
            require(is_scaled, "range of inputs", (low, high), expected)
        return inputs

    def __repr__(self) -> str:
        owner = "the global model" if self.client is None else f"the model of client {self.client}"
        dataset = self.input_spec.dataset
        if self.spec.dataset not in (USER_PROVIDED, dataset):
            dataset = f"{self.spec.dataset} (own {dataset!r})"
        is_image = self.input_spec.dtype != "int32" and len(self.input_spec.input_shape) == 3
        noun = "images" if is_image else "inputs"
        return (
            f"TrainedModel({self.spec.model} for {self.input_spec.input_shape} {noun} of "
            f"{self.input_spec.num_classes} classes, {owner} of {self.spec.algorithm} on "
            f"{dataset})"
        )

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """Return what treescope shows: the origin of the model, and its parameters as a tree."""
        from treescope import repr_lib

        names = {"algorithm": self.spec.algorithm, "model": self.spec.model, "client": self.client}
        attributes = {**names, "variables": self.variables}
        return repr_lib.render_object_constructor(type(self), attributes, path, subtree_renderer)


def extract_model(
    signature: Signature,
    spec: ResolvedRunSpec,
    input_spec: InputSpec,
    state: Any,
    hp: Any,
    client: int | None = None,
) -> TrainedModel:
    """Return a model of a federation's final state.

    Args:
      signature: the static choices of the run.
      spec: settings of the run.
      input_spec: the properties of the data.
      state: the final state of the federation.
      hp: numeric hyperparameters, as programs read them.
      client: id of the client (default: the global model).

    Returns:
      The model, on the host.

    Raises:
      ConfigError: for a client of a method whose clients share the global model, and for the global
        model of a method without one.
    """
    algorithm, task = build_algorithm(signature), signature.training.task
    get_personal, expected = algorithm.personal_variables, f"0 to {spec.num_clients - 1}"
    if client is None and algorithm.global_model is not None:
        variables = algorithm.get_result_model(state)
    elif client is not None and get_personal is not None and 0 <= client < spec.num_clients:
        variables = get_personal(hp, state, jnp.int32(client))
        task = task._replace(model=algorithm.personal_model or task.model)
    else:
        if client is None:
            expected += f": {spec.algorithm} has no global model"
        elif get_personal is None:
            expected = f"no value: clients of {spec.algorithm} have no models of their own"
        raise make_value_error("client", client, expected)
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
    """Return the static choices of a run that is read from a file.

    Args:
      spec: settings of the run.
      input_spec: the properties of the data.
      network: network of the user, if the run had one.
      digest: digest of that network.
      optimizer: optimizer of the user, if the run had one.

    Returns:
      The static choices.

    Raises:
      ConfigError: if the network is missing, or is another one.
    """
    is_user_network, expected = spec.model == USER_PROVIDED, "None, as the file names the network"
    if is_user_network:
        expected = "the network that it was trained with"
    require((network is not None) == is_user_network, "network", network, expected)
    data_properties: Any = input_spec  # in place of the data set
    signature = build_signature(spec, data_properties, network, optimizer)
    if is_user_network:
        is_equal = compute_network_digest(signature.network) == digest
        require(is_equal, "network", network, f"{expected}, and its options")
    return signature


class ModelFile(NamedTuple):
    """Content of the file of a model."""

    spec: RunSpec
    input_spec: InputSpec
    variables: Any
    client: int | None
    network_digest: str | None
    variables_digest: str


def read_model_file(path: Path) -> ModelFile:
    """Read a file that `TrainedModel.save` wrote.

    Raises:
      FileNotFoundError: if there is no such file.
      DamagedFileError: if the file is not as it was written.
    """
    data = path.read_bytes()
    try:
        content = serialization.msgpack_restore(data)
        if content["sha256"] != hashlib.sha256(content["variables"]).hexdigest():
            raise DamagedFileError("its checksum does not match")
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
        reason = str(error) if isinstance(error, ConfigError) else type(error).__name__
        text = f"expected a model of this program, but it is damaged ({reason})"
        if path.suffix in (".json", ".npz", ".yaml"):
            command = "`fedjax-het export RESULT.json --model model.msgpack`"
            text = f"expected a model, not a file of a result; {command} exports the model"
        message = f"{display_name('model')} = {str(path)!r}: {text}"
        raise DamagedFileError(to_one_line(message)) from error


@validate_arguments
def load_model(path: str | Path, *, network: Any = None) -> TrainedModel:
    """Load a model that `Result.save_model` or `TrainedModel.save` wrote.

    Args:
      path: file of the model.
      network: network of the user that the run had, if it had one.

    Returns:
      The model.

    Raises:
      FileNotFoundError: if there is no such file.
      DamagedFileError: if the file is not as it was written.
      ConfigError: if the network is missing, or is another one.

    Example:
      >>> import tempfile
      >>> from fedjax_het import RunSpec, load_dataset, load_model, simulate
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=2)
      >>> path = simulate(spec).save_model(tempfile.mkdtemp() + "/model.msgpack")
      >>> load_model(path).predict(load_dataset("digits").test_inputs[:5]).shape
      (5,)
    """
    file = read_model_file(Path(path))
    spec = file.spec.resolved()
    signature = build_signature_from_file(spec, file.input_spec, network, file.network_digest)
    task = signature.training.task
    if file.client is not None:
        task = task._replace(model=build_algorithm(signature).personal_model or task.model)
    return TrainedModel(
        spec, file.input_spec, file.variables, file.client, task, file.network_digest
    )


@validate_arguments
def evaluate(
    model: TrainedModel, dataset: Dataset, *, split: Literal["test", "train"] = "test"
) -> Evaluation | TaskEvaluation:
    """Evaluate a model on the examples of a data set.

    Args:
      model: the model.
      dataset: the data set.
      split: "test" or "train".

    Returns:
      Accuracy, loss, confusion matrix and calibration error; score and loss for a task without
      classes.

    Raises:
      ConfigError: for inputs of another shape, type or scale, another task, or another number of
        classes. Also for names of classes, features or categories that the model does not have;
        names in another order are matched.

    Example:
      >>> from fedjax_het import RunSpec, evaluate, load_dataset, simulate
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=2)
      >>> evaluate(simulate(spec).model(), load_dataset("digits")).confusion.shape
      (10, 10)
    """
    expected = f"{model.input_spec.task!r}, as the model has"
    require(dataset.task == model.input_spec.task, "task of dataset", dataset.task, expected)
    inputs, labels = (getattr(dataset, f"{split}_{part}") for part in ("inputs", "labels"))
    inputs, labels = match_names(model.input_spec, dataset, inputs, labels)
    return model.evaluate(inputs, labels)


def load_initial_model(spec: ResolvedRunSpec, signature: Signature) -> ModelFile | None:
    """Load the model that a run begins with.

    Args:
      spec: the settings.
      signature: the static choices of the run.

    Returns:
      The model; None if the run draws its weights.

    Raises:
      ConfigError: if the file holds no model, or the model of another network.
    """
    if spec.init_from is None:
        return None
    model_file = _read_initial_model(spec.init_from)
    expected_variables = jax.eval_shape(signature.training.task.model.init, make_key(0))
    expected_shapes = _format_leaf_shapes(expected_variables)
    file_shapes = _format_leaf_shapes(model_file.variables)
    for name in {**expected_shapes, **file_shapes}:
        file_shape, shape = file_shapes.get(name, "nothing"), expected_shapes.get(name, "nothing")
        expected = (
            f"a model of this network, {spec.model}, in which {name} is {shape}, not {file_shape}"
        )
        require(file_shape == shape, "init_from", spec.init_from, expected)
    leaves = jax.tree.leaves(model_file.variables)  # of dicts, which are ordered by name
    variables = jax.tree.unflatten(jax.tree.structure(expected_variables), leaves)
    return model_file._replace(variables=variables)


def compute_initial_digest(path: str) -> str:
    """Return the digest of a file's model; "unknown" if it cannot be read, which ends the run."""
    try:
        return _read_initial_model(path).variables_digest
    except ConfigError:
        return "unknown"


def _read_initial_model(path: str) -> ModelFile:
    try:
        with display_names({"model": "init_from"}):
            return read_model_file(Path(path).expanduser())
    except OSError as error:
        expected = f"a model's file, as save_model writes it ({error.strerror})"
        raise make_value_error("init_from", path, expected) from error


def _format_leaf_shapes(tree: Any) -> dict[str, str]:
    """Return dtype and shape of each leaf by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype} {leaf.shape}"
        for path, leaf in leaves
    }
