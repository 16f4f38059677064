"""Result of a run: metrics by round, a summary, and files that are named by a digest."""

import contextlib
import functools
import hashlib
import io
import json
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_het._version import __version__
from fedjax_het.algorithms import METHODS
from fedjax_het.config.run_spec import RunSpec, spec_to_yaml
from fedjax_het.config.settings import rename_former_settings
from fedjax_het.data import Partition
from fedjax_het.metrics.convergence import TrainingCost, cost_to_reach
from fedjax_het.metrics.declarations import NOT_TRAINED
from fedjax_het.metrics.registry import get_metric_info
from fedjax_het.runtime import result_display
from fedjax_het.runtime.history import CALLBACK
from fedjax_het.runtime.identity import ENVIRONMENT_FIELDS, compute_digest
from fedjax_het.runtime.result_display import to_json_value
from fedjax_het.tasks.wording import name_score
from fedjax_het.utils.arrays import decode_arrays, encode_arrays, save_arrays
from fedjax_het.utils.config import UnitInterval, validate, validate_arguments, validate_fields
from fedjax_het.utils.errors import ConfigError, display_name, require, require_name
from fedjax_het.utils.io import (
    DamagedFileError,
    find_stored_file,
    read_stored_file,
    write_atomically,
)
from fedjax_het.utils.text import escape_mathtext, to_one_line

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

    from fedjax_het.runtime.data_assignment import HeldOutClients
    from fedjax_het.runtime.synthetic_dataset import SyntheticDataset
    from fedjax_het.runtime.trained_model import TrainedModel

PARTIAL_SUFFIX = ".partial"
"""End of the name of the files of a run that a callback or the caller ended early."""
STATE_SUFFIX = ".state.npz"
"""End of the name of a file with the final state of a run."""
ACCURACIES = ("final_accuracy", "final_accuracy_std", "best_accuracy", "last_accuracy")
RISE_METRICS = ("window_accuracy", "rise_time", "rounds_to_half")
CLIENT_ACCURACIES = ("bmta", "bmta_round", "bmta_worst_decile", "final_client_accuracy")
"""Names of a summary's values, see `runtime.result_builder.summarize_metrics`."""
VALIDATION_ACCURACIES = (
    *("best_validation_accuracy", "best_round", "best_client_validation_accuracy"),
)
"""Names of a summary's values of a run with validation examples."""
_HELD_OUT_ACCURACIES = ("held_out_accuracy", "held_out_tuned_accuracy")
_COSTS = (
    *("wall_seconds", "client_samples_per_second", "bytes_up", "bytes_down", "rounds"),
    "simulated_seconds",
)
SUMMARY_NUMBERS = (
    *(*ACCURACIES, *RISE_METRICS, *CLIENT_ACCURACIES, *VALIDATION_ACCURACIES),
    *(*_HELD_OUT_ACCURACIES, *_COSTS),
)
"""Names of a summary's numbers."""
_ENVIRONMENT = (
    "fedjax_het",
    *ENVIRONMENT_FIELDS,
    "device",
    "matmul_precision",
    "precision",
    "prng",
)
_DATA_FACTS = ("dataset_note", "dataset_source", "dataset_order")
_SUMMARY_TYPES: dict[str, Any] = {  # of the values that reports read
    **dict.fromkeys((*SUMMARY_NUMBERS, "epsilon"), float | None),
    **dict.fromkeys((*_ENVIRONMENT, "finished", *_DATA_FACTS), str | None),
    **dict.fromkeys(("diverged", "x64"), bool | None),
    **dict.fromkeys(("stopped_early", "functions"), dict[str, Any] | None),
}
AXIS_LABELS = {
    "round": "Round",
    "bytes": "Bytes moved, up and down",
    "seconds": "Simulated time (s)",
}
"""Labels of the horizontal axes of curves."""
_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{64})"')
_CHECKSUM_PLACEHOLDER = "0" * 64


def build_state_path(folder: Path, stem: str) -> Path:
    """Return the path of the final state of a run.

    Args:
      folder: folder of results.
      stem: `Result.file_stem`.

    Returns:
      `folder/<stem>.state.npz`.
    """
    return folder / f"{stem}{STATE_SUFFIX}"


class _Metrics(dict[str, np.ndarray]):
    """Metrics by name; the error of an unknown name lists all."""

    def __missing__(self, name: str) -> np.ndarray:
        raise KeyError(f"metric = {name!r} is unknown: expected {', '.join(self)}")


@dataclass(repr=False)
class Result:
    """A finished run.

    Attributes:
      spec: settings of the run.
      metrics: one value per round and metric, NaN where nothing was measured: `test_accuracy` (a
        fraction), `test_loss` and `train_loss` (nats), `update_norm`, `bytes_up`, `bytes_down`,
        `client_samples`, and the records of the method. `train_loss` is NaN in rounds in which no
        client trained, and `update_norm` if the model stayed, too. Data sets with domains add
        `test_accuracy_<domain>` and the mean `test_accuracy_domains`. Clients with own tests add
        `client_accuracy` `[rounds, clients]`, `mean_client_accuracy`, and
        `client_accuracy_<name>` if clients have names. Validation examples add
        `validation_accuracy` and `validation_loss` of the global model, and, for clients with own
        tests, `client_validation_accuracy` and `mean_client_validation_accuracy`. Client selection
        by losses adds `client_train_loss` `[rounds, clients]`, and `candidate_loss` if candidates
        report the loss of the current model.
      summary: numbers and texts about the run, which JSON can hold.
      artifacts: further arrays of the method.
      state: final state of the federation. Clients' states on the host are `HostClientStates`,
        whose method `client(k)` returns one of them. Not saved here, see `keep_state` of
        `simulate`.
      partition: training examples of each client; not saved here.
      tests: test examples of each client, if clients have own tests; not saved here.
      models: function that returns trained models, see `model`; None without a state.
      held_out: clients that took no part, if there are any; not saved here.
      validation: validation examples of each client, positions in the training set, if the run has
        any; not saved here.

    Example:
      >>> from fedjax_het import RunSpec, simulate
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=2)
      >>> result = simulate(spec)
      >>> result.rounds, result.metrics["test_accuracy"].shape
      (2, (2,))
    """

    spec: RunSpec
    metrics: dict[str, np.ndarray]
    summary: dict[str, Any]
    artifacts: dict[str, np.ndarray] = field(default_factory=dict)
    state: Any = None
    partition: Partition | None = None
    tests: Partition | None = None
    models: Callable[..., Any] | None = field(default=None, repr=False)
    held_out: "HeldOutClients | None" = field(default=None, repr=False)
    validation: Partition | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.metrics = _Metrics(self.metrics)

    @property
    def final_accuracy(self) -> float | None:
        """Mean accuracy of the last five rounds, a fraction.

        None if the run diverged, and for a method without a global model.
        """
        return self.summary.get("final_accuracy")

    @property
    def best_accuracy(self) -> float | None:
        """Test accuracy of the best round, a fraction; None for a method without a global model.

        The best round has the highest validation accuracy. Without validation examples it has the
        highest test accuracy.
        """
        return self.summary.get("best_accuracy")

    @property
    def client_accuracy(self) -> float | None:
        """Mean accuracy on clients' own tests in the best round, a fraction; None without tests.

        The best round has the highest mean on the clients' validation examples. Without them it has
        the highest mean on their tests.
        """
        return self.summary.get("bmta")

    @property
    def diverged(self) -> bool:
        """Whether losses, update or state became infinite or NaN."""
        return bool(self.summary["diverged"])

    @property
    def rounds(self) -> int:
        """Number of rounds that took place."""
        return int(self.summary["rounds"])

    @property
    def is_partial(self) -> bool:
        """Whether a callback or the caller ended the run before its settings did."""
        return (self.summary.get("stopped_early") or {}).get("why") == CALLBACK

    @property
    def file_stem(self) -> str:
        """Name of the result's files without suffix: digest, and ".partial" for a partial run."""
        return self.digest() + (PARTIAL_SUFFIX if self.is_partial else "")

    @property
    def seconds(self) -> float:
        """Wall-clock seconds with compilation; runs in parallel share them equally."""
        return float(self.summary["wall_seconds"])

    @property
    def bytes_up(self) -> float:
        """Bytes that all clients sent in all rounds."""
        return float(self.summary["bytes_up"])

    @property
    def bytes_down(self) -> float:
        """Bytes that all clients received in all rounds."""
        return float(self.summary["bytes_down"])

    def costs_to(self, accuracy: float) -> TrainingCost | None:
        """Return the cost until the accuracy first reached a value; None if it never did.

        The accuracy is the global model's, or the mean on clients' own tests without a global
        model.

        Args:
          accuracy: a fraction in [0, 1].

        Returns:
          The cost of the rounds up to the first round with this accuracy.
        """
        accuracy = validate("accuracy", accuracy, UnitInterval)
        curve = result_display.get_accuracy_name(self.metrics)
        return cost_to_reach(self.metrics, self.summary, accuracy, curve)

    def __repr__(self) -> str:
        settings = result_display.format_settings(self.spec, self.summary)
        return f"Result({settings}\n       {result_display.format_outcome(self)})"

    def _repr_html_(self) -> str:
        return result_display.format_result_html(self)

    @property
    def _curves(self) -> dict[str, np.ndarray]:
        return {name: values for name, values in self.metrics.items() if values.ndim == 1}

    def plot(
        self,
        metric: str | None = None,
        *,
        x: Literal["round", "bytes", "seconds"] = "round",
        axes: "Axes | None" = None,
    ) -> "Axes":
        """Plot a metric in its declared unit, see `fedjax_het.MetricInfo`.

        Rounds without an evaluation are left out. Rounds in which no client trained are a gap.

        Args:
          metric: name of a metric with one value per round (default: the accuracy).
          x: horizontal axis: rounds, bytes that were sent, or simulated seconds.
          axes: axes to draw into (default: axes of a new figure).

        Returns:
          The axes.

        Raises:
          ConfigError: for unknown names.
        """
        import matplotlib.pyplot as plt

        metrics, method = self.metrics, self.spec.algorithm
        metric = result_display.get_accuracy_name(metrics) if metric is None else metric
        require_name("metric", metric, self._curves)
        require_name("x", x, AXIS_LABELS)
        if x == "seconds" and "simulated_seconds" not in metrics:
            raise ConfigError(
                "x = 'seconds': expected a run with simulated time, e.g. system='speed'"
            )
        if axes is None:
            _, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        positions = np.arange(1, len(metrics[metric]) + 1)
        if x == "bytes":
            positions = np.cumsum(metrics["bytes_up"] + metrics["bytes_down"])
        elif x == "seconds":
            positions = np.cumsum(metrics["simulated_seconds"])
        info = get_metric_info(metric)
        is_drawn = np.isfinite(metrics[metric]) | (info.missing == NOT_TRAINED)  # NaN is a gap
        values = info.scale * metrics[metric][is_drawn]
        color = (METHODS[method].color if method in METHODS else "") or result_display.DEFAULT_COLOR
        label = escape_mathtext(f"{method}, seed {self.spec.seed}")
        (line,) = axes.plot(positions[is_drawn], values, color=color, label=label)
        result_display.mark_isolated_points(line)
        axes.set_xlabel(AXIS_LABELS[x])
        y_label = name_score(
            info.axis_label or metric.replace("_", " "), [self.summary.get("task")]
        )
        axes.set_ylabel(escape_mathtext(y_label))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        return axes

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row per round, from 1, and a column per metric with one value per round."""
        import pandas as pd

        rounds = len(next(iter(self._curves.values()), ()))
        return pd.DataFrame(self._curves, index=pd.RangeIndex(1, rounds + 1, name="round"))

    def to_xarray(self) -> "xr.Dataset":
        """Return all metrics with the dimensions round and client.

        Raises:
          ConfigError: if xarray, which the extra `xarray` installs, is missing.
        """
        return result_display.build_rounds_dataset(self)

    def model(
        self, client: int | None = None, *, network: Any = None, optimizer: Any = None
    ) -> "TrainedModel":
        """Return a model after the last round.

        Args:
          client: id of a client whose clients have own models (default: the global model).
          network: network of the user that the run had; only for a loaded result.
          optimizer: optimizer of the user that the run had; only for a loaded result.

        Returns:
          The trained model.

        Raises:
          ConfigError: if the method has no such model, and for a result without a state. A loaded
            result reads its state from a file, which `keep_state` writes.
        """
        if self.models is None:
            flag = display_name("keep_state")
            flag = flag if flag.startswith("--") else f"{flag}=True"
            raise ConfigError(f"the result has no final state: expected a run with {flag}")
        return self.models(client, network=network, optimizer=optimizer)

    def save_model(
        self,
        path: str | os.PathLike,
        client: int | None = None,
        *,
        network: Any = None,
        optimizer: Any = None,
    ) -> Path:
        """Write a model to a file for `load_model`.

        Args:
          path: file to write.
          client: id of a client whose clients have own models (default: the global model).
          network: network of the user that the run had; only for a loaded result.
          optimizer: optimizer of the user that the run had; only for a loaded result.

        Returns:
          The path.

        Raises:
          ConfigError: if the result has no such model.
          OSError: if the file cannot be written.
        """
        return self.model(client, network=network, optimizer=optimizer).save(path)

    def synthetic_dataset(self, *, network: Any = None) -> "SyntheticDataset":
        """Return the labeled inputs that the method has synthesized, in the scale of the data.

        Args:
          network: network of the user that the run had; only for a loaded result.

        Returns:
          The inputs with their labels.

        Raises:
          ConfigError: for a method without synthetic data, for a run that ended before the
            method synthesized any, and for a result without a state.
        """
        from fedjax_het.runtime.synthetic_dataset import (
            build_synthetic_dataset,
            require_synthetic_data,
        )

        if self.summary.get("synthesis_iterations") == 0:
            first = self.spec.options.get("trajectory_rounds")
            name = f"{display_name('options')} trajectory_rounds"
            raise ConfigError(
                f"the result has no synthetic data: {self.spec.algorithm} synthesizes after round "
                f"{first} ({name}), and the run has {self.rounds} rounds"
            )
        require_synthetic_data(self.artifacts, self.spec.algorithm)
        inputs = self.model(network=network).input_spec
        return build_synthetic_dataset(self.artifacts, inputs)

    def save_synthetic_dataset(self, path: str | os.PathLike, *, network: Any = None) -> Path:
        """Write the synthetic data to a plain .npz file, which other code can train on.

        Args:
          path: file to write.
          network: network of the user that the run had; only for a loaded result.

        Returns:
          The path.
        """
        return self.synthetic_dataset(network=network).save(path)

    def digest(self) -> str:
        """Return the name of the result's files.

        It is a hash of settings, package version, device and precision; `runtime.identity` lists
        all parts. The user's objects replace the objects of the settings.
        """
        return compute_digest(self.spec, self.summary)

    @validate_arguments
    def save(self, directory: str | os.PathLike) -> Path:
        """Write the result to a folder.

        The files are `<digest>.npz` (metrics, artifacts), `<digest>.yaml` (settings for `--config`)
        and `<digest>.json` (settings, summary, checksums). Each file is replaced in one step, the
        JSON last, so a run whose JSON exists is complete. Values that JSON cannot hold are
        converted by `to_json_value`. The files of a run that a callback or the caller ended early
        are named `<digest>.partial`; the result of the whole run replaces them.

        Returns:
          The path of the JSON file.

        Raises:
          OSError: if a file cannot be written.
        """
        directory = Path(directory)
        name, buffer = self.file_stem, io.BytesIO()
        arrays = {f"metrics/{k}": v for k, v in self.metrics.items()}
        arrays |= {f"artifacts/{k}": v for k, v in self.artifacts.items()}
        save_arrays(buffer, encode_arrays(arrays), compressed=True)
        record = {
            "spec": to_json_value(self.spec.to_dict()),
            "summary": to_json_value(self.summary),
            "arrays": hashlib.sha256(buffer.getvalue()).hexdigest(),
        }
        contents = {
            "npz": buffer.getvalue(),
            "yaml": spec_to_yaml(self.spec).encode(),
            "json": _encode_record(record).encode(),
        }
        for suffix, content in contents.items():
            write = operator.methodcaller("write", content)
            write_atomically(directory / f"{name}.{suffix}", write)
        for path in directory.glob(f"{name}{PARTIAL_SUFFIX}.*"):
            with contextlib.suppress(OSError):
                path.unlink()
        return directory / f"{name}.json"

    @classmethod
    @validate_arguments
    def load(cls, path: str | os.PathLike) -> "Result":
        """Read a result from its folder or from the archive `runs.zip` in it.

        Results of old versions, without checksums, are accepted.

        Args:
          path: path of the JSON file.

        Returns:
          The result, with models if the file of its final state exists.

        Raises:
          FileNotFoundError: if there is no such file.
          DamagedFileError: if a file is damaged, is no result, or has settings that this version
            does not have.
          OSError: if a file cannot be read.
        """
        path = Path(path)
        try:
            text = read_stored_file(path)
            arrays = read_stored_file(path.with_suffix(".npz")) if text else b""
        except FileNotFoundError as error:
            find_stored_file(path)  # raises if the JSON is missing
            message = f"result {str(path)!r}: {error.filename!r} is missing"
            raise DamagedFileError(message) from error
        try:
            result = cls._parse(text.decode(), arrays)
        except Exception as error:  # any error of a reader of JSON, zips or arrays
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            message = to_one_line(f"result {str(path)!r} is damaged ({kind}{error})")
            raise DamagedFileError(message) from error
        state = build_state_path(path.parent, path.stem)
        result.models = functools.partial(_load_state_model, state) if state.exists() else None
        return result

    @classmethod
    def _parse(cls, text: str, content: bytes) -> "Result":
        record = decode_record(text)
        checksum, expected = hashlib.sha256(content).hexdigest(), record.get("arrays")
        require(expected in (None, checksum), "checksum of the .npz", checksum, f"{expected}")
        arrays: dict[str, dict[str, np.ndarray]] = {"metrics": {}, "artifacts": {}}
        with np.load(io.BytesIO(content), allow_pickle=False) as data:
            for key, array in decode_arrays(data).items():
                group, _, name = key.partition("/")
                require(group in arrays, "array", key, "metrics/NAME or artifacts/NAME")
                arrays[group][name] = array
        # Version 0.6 stored the reason of an early stop only.
        metrics, summary = arrays["metrics"], {"stopped_early": None, **record["summary"]}
        for name, array in metrics.items():
            is_numeric = array.ndim > 0 and array.dtype.kind in "biuf"
            actual = f"{array.dtype} {array.shape}"
            require(is_numeric, f"metric {name}", actual, "numbers by round")
        lengths = {len(array) for array in metrics.values() if array.ndim == 1}
        require(len(lengths) <= 1, "rounds of the metrics", sorted(lengths), "equal numbers")
        for name in summary.keys() & _SUMMARY_TYPES.keys():
            validate(name, summary[name], _SUMMARY_TYPES[name])
        spec = _parse_spec(record["spec"], summary.get("fedjax_het"))
        return cls(spec, metrics, summary, arrays["artifacts"])


def _load_state_model(path: Path, client: int | None, **user_objects: Any) -> "TrainedModel":
    from fedjax_het.runtime.checkpointing import load_state_model

    return load_state_model(path, client, **user_objects)


def _encode_record(record: dict[str, Any]) -> str:
    """Return the JSON of a record with a checksum of all of it among its keys."""
    record = {**record, "checksum": _CHECKSUM_PLACEHOLDER}
    text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False, default=str)
    return text.replace(_CHECKSUM_PLACEHOLDER, hashlib.sha256(text.encode()).hexdigest(), 1)


def decode_record(text: str) -> dict[str, Any]:
    """Parse the JSON of a result.

    Returns:
      A dictionary with the keys `spec`, `summary` and, except for old versions, `arrays` and
      `checksum`.

    Raises:
      ValueError: if the text is damaged.
    """
    match = _CHECKSUM.search(text)
    if match is not None:
        unsigned_text = text.replace(match[1], _CHECKSUM_PLACEHOLDER, 1)
        checksum = hashlib.sha256(unsigned_text.encode()).hexdigest()
        require(match[1] == checksum, "checksum", match[1], f"{checksum}, the checksum of the text")
    record = json.loads(text, parse_constant=_reject_constant)
    require(isinstance(record, dict), "record", type(record).__name__, "a dict")
    keys = ("arrays", "checksum", "spec", "summary")
    for key in sorted(record.keys() - {*keys}):
        raise ConfigError(f"key = {key!r}: expected one of {', '.join(keys)}")
    for key in ("spec", "summary"):
        require(isinstance(record.get(key), dict), key, record.get(key), "a dict")
    is_signed = "checksum" not in record or match is not None
    require(is_signed, "checksum", record.get("checksum"), "64 hexadecimal digits")
    return record


def _reject_constant(name: str) -> float:
    raise ConfigError(f"number = {name}: expected a finite number")


def _parse_spec(values: dict[str, Any], version: Any) -> RunSpec:
    """Return the settings of a result that this version of fedjax_het wrote.

    Raises:
      ConfigError: for settings that this version does not have, and for values of other types.
    """
    values = rename_former_settings(values)
    for name in values.keys() - RunSpec.__dataclass_fields__.keys():
        version = version if isinstance(version, str) else "another version"
        raise ConfigError(
            f"setting = {name!r}: fedjax_het {__version__} does not have it; the result was made by "
            f"{version}"
        )
    validate_fields(values, RunSpec)
    for name, value in values.get("hp", {}).items():
        validate(name, value, float)
    return RunSpec.from_dict(values)
