"""What a run leaves behind: curves, a summary, and files named by the hash of what made it."""

import functools
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from fedjax_het.config.run_spec import RunSpec, spec_to_yaml
from fedjax_het.data import Partition
from fedjax_het.metrics.convergence import rise_time, rolling_mean, rounds_to_reach
from fedjax_het.metrics.costs import TrainingCost, cost_to_reach
from fedjax_het.metrics.personal import best_mean_accuracy, worst_decile
from fedjax_het.runtime.provenance import compute_run_digest
from fedjax_het.runtime.result_display import (
    build_rounds_dataframe,
    build_rounds_dataset,
    format_result,
    format_result_html,
    get_accuracy_curve_name,
    plot_metric,
)
from fedjax_het.runtime.result_schema import (
    decode_record,
    encode_record,
    to_json_value,
    validate_arrays,
    validate_spec,
    validate_summary,
)
from fedjax_het.utils.arrays import decode_arrays, encode_arrays, save_arrays
from fedjax_het.utils.config import Bounds, validate_number
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.io import (
    DamagedFileError,
    find_stored_file,
    read_stored_file,
    write_atomically,
)
from fedjax_het.utils.text import to_one_line

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

    from fedjax_het.runtime.data_assignment import HeldOutClients
    from fedjax_het.runtime.synthetic_dataset import SyntheticDataset
    from fedjax_het.runtime.trained_model import TrainedModel

STATE_SUFFIX = ".state.npz"


def build_state_path(folder: Path, digest: str) -> Path:
    """Return the file of the final state of a run, named by the digest of its result."""
    return folder / f"{digest}{STATE_SUFFIX}"


@dataclass(repr=False)
class Result:
    """A finished run.

    `metrics` holds one value per round (NaN where nothing was measured): test_accuracy (a
    share), test_loss and train_loss (nats), update_norm, bytes_up, bytes_down, client_samples; of a
    data set with domains also test_accuracy_<domain>, and test_accuracy_domains, their mean; where
    clients have tests of their own also client_accuracy `[rounds, K]` and mean_client_accuracy, and
    where clients have names client_accuracy_<name>; and what a method records besides.
    `artifacts` holds what a method leaves besides (arrays). `state` is the final federation
    (its `clients` a `HostClientStates` where they are on the host: ask it for `client(k)`),
    `partition` how the data were split, `tests` which test images each client has, if any, and
    `models` gives trained models, see `model`, `held_out` are the clients that took no part; none
    of them is saved here.
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

    @property
    def final_accuracy(self) -> float | None:
        """Share, mean of the last five rounds; None where the run diverged, or has no global
        model."""
        return self.summary.get("final_accuracy")

    @property
    def best_accuracy(self) -> float | None:
        """Share, of the best round; None of a method without a global model."""
        return self.summary.get("best_accuracy")

    @property
    def client_accuracy(self) -> float | None:
        """Share, the best mean over clients' own tests; None where clients have none."""
        return self.summary.get("bmta")

    @property
    def diverged(self) -> bool:
        """Whether losses, update or state were not finite."""
        return bool(self.summary["diverged"])

    @property
    def rounds(self) -> int:
        """That took place."""
        return int(self.summary["rounds"])

    @property
    def seconds(self) -> float:
        """Wall-clock, compilation included; of runs made together, its share."""
        return float(self.summary["wall_seconds"])

    @property
    def bytes_up(self) -> float:
        """Sent by all clients in all rounds."""
        return float(self.summary["bytes_up"])

    @property
    def bytes_down(self) -> float:
        """Sent to them."""
        return float(self.summary["bytes_down"])

    def costs_to(self, accuracy: float) -> TrainingCost | None:
        """What it took until the accuracy, that of the global model or the mean on clients' own
        tests where there is none, was first that high; None if it never was."""
        accuracy = validate_number("accuracy", accuracy, Bounds(0, 1))
        return cost_to_reach(self.metrics, self.summary, accuracy, get_accuracy_curve_name(self))

    def __repr__(self) -> str:
        return format_result(self)

    def _repr_html_(self) -> str:
        return format_result_html(self)

    def plot(
        self,
        metric: str | None = None,
        *,
        x: Literal["round", "bytes"] = "round",
        axes: "Axes | None" = None,
    ) -> "Axes":
        """Draw a curve, into `axes` or a new figure, and return them.

        metric: one of `metrics` that has a value by round (default: the accuracy). x: what it is
        drawn against, rounds or the bytes moved until then. Raises ConfigError for other names.
        """
        return plot_metric(self, metric, x=x, axes=axes)

    def to_pandas(self) -> "pd.DataFrame":
        """One row per round, from 1, a column per metric that has a value by round."""
        return build_rounds_dataframe(self)

    def to_xarray(self) -> "xr.Dataset":
        """All metrics with named dimensions: round, client. Needs the extra `xarray`; ConfigError
        without it."""
        return build_rounds_dataset(self)

    def model(
        self, client: int | None = None, *, network: Any = None, optimizer: Any = None
    ) -> "TrainedModel":
        """The global model after the last round, or that of a client where clients have models of
        their own.

        network, optimizer: the user's own, as given to the run; of a loaded result alone. Raises
        ConfigError for another client, and for a result without a state: a loaded one has its state
        in a file beside it, see `simulate`'s and `sweep`'s `keep_state`.
        """
        expected = "a result whose state was kept: keep_state = True"
        require(self.models is not None, "state", self.state, expected)
        assert self.models is not None
        return self.models(client, network=network, optimizer=optimizer)

    def save_model(
        self,
        path: str | Path,
        client: int | None = None,
        *,
        network: Any = None,
        optimizer: Any = None,
    ) -> Path:
        """Write that model to a file that `load_model` reads; see `TrainedModel.save`."""
        return self.model(client, network=network, optimizer=optimizer).save(path)

    def synthetic_dataset(self, *, network: Any = None) -> "SyntheticDataset":
        """The images that the method has made, in the data's own scale, with their labels. Raises
        ConfigError for methods that make none, and where `model` does."""
        from fedjax_het.runtime.synthetic_dataset import build_synthetic_dataset

        inputs = self.model(network=network).input_spec
        return build_synthetic_dataset(self.artifacts, inputs, self.spec.algorithm)

    def save_synthetic_dataset(self, path: str | Path, *, network: Any = None) -> Path:
        """Write that set to a plain .npz, which other code can train on; see `SyntheticDataset`."""
        return self.synthetic_dataset(network=network).save(path)

    def digest(self) -> str:
        """The name of its files: settings, package version, device and precision, hashed; and what
        is not as the settings name it: see `runtime.data_assignment.collect_user_digests`."""
        summary = self.summary
        data = summary.get("dataset_digest") if self.spec.dataset == "user" else None
        return compute_run_digest(
            self.spec.digest(),
            summary,
            summary.get("own_dataset") or data,
            summary.get("network_digest"),
            summary.get("own_partition"),
            summary.get("initial_digest"),
            summary.get("optimizer_digest"),
        )

    def save(self, directory: str | Path) -> Path:
        """Write `<digest>.npz` (curves, artifacts), `<digest>.yaml` (the settings, for `--config`),
        then `<digest>.json` (settings, summary).

        Each file is replaced in one step, the JSON last: where it is, the run is complete. It has
        a checksum of itself and of the other file. Values of the summary that JSON does not have
        are kept as near as can be (`runtime.result_schema.to_json_value`). Returns the JSON's path.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        name = self.digest()
        arrays = {f"metrics/{k}": v for k, v in self.metrics.items()}
        arrays |= {f"artifacts/{k}": v for k, v in self.artifacts.items()}
        arrays = encode_arrays(arrays)
        checksums = []

        def write_arrays(file: BinaryIO) -> None:
            save_arrays(file, arrays, compressed=True)
            file.seek(0)
            checksums.append(hashlib.file_digest(file, "sha256").hexdigest())  # type: ignore[arg-type]

        write_atomically(directory / f"{name}.npz", write_arrays)
        record = {
            "spec": to_json_value(self.spec.to_dict()),
            "summary": to_json_value(self.summary),
            "arrays": checksums[-1],
        }
        text = spec_to_yaml(self.spec).encode()
        write_atomically(directory / f"{name}.yaml", lambda file: file.write(text))
        path = directory / f"{name}.json"
        write_atomically(path, lambda file: file.write(encode_record(record).encode()))
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Result":
        """The result whose JSON is at `path`.

        Raises FileNotFoundError where there is none, other OSErrors of the file system, and
        DamagedFileError, in one line, for a file that is damaged, holds something else, or is of a
        version with settings that this one does not have. Files of versions before checksums are
        read as they are.
        """
        path = Path(path)
        try:
            text = read_stored_file(path)
            arrays = read_stored_file(path.with_suffix(".npz")) if text else b""
        except FileNotFoundError as error:
            find_stored_file(path)  # raises if the JSON is missing
            raise DamagedFileError(
                f"result {str(path)!r}: {error.filename!r} is missing"
            ) from error
        try:
            result = cls._parse(text.decode(), arrays)
        except Exception as error:  # what readers of JSON, zips and arrays raise on arbitrary bytes
            reason = (
                f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else error
            )
            raise DamagedFileError(
                to_one_line(f"result {str(path)!r} is damaged ({reason})")
            ) from error
        state = build_state_path(path.parent, path.stem)
        result.models = functools.partial(_load_state_model, state) if state.exists() else None
        return result

    @classmethod
    def _parse(cls, text: str, arrays: bytes) -> "Result":
        record = decode_record(text)
        expected_checksum = record.get("arrays")
        checksum = hashlib.sha256(arrays).hexdigest()
        require(
            expected_checksum in (None, checksum),
            "checksum of the .npz",
            checksum,
            f"{expected_checksum}",
        )
        with np.load(io.BytesIO(arrays), allow_pickle=False) as data:
            metrics, artifacts = validate_arrays(decode_arrays(data))
        summary = validate_summary(record["summary"])
        spec = validate_spec(record["spec"], summary.get("fedjax_het"))
        return cls(spec, metrics, summary, artifacts)


def _load_state_model(path: Path, client: int | None, **user_objects: Any) -> "TrainedModel":
    from fedjax_het.runtime.trained_model import load_state_model

    return load_state_model(path, client, **user_objects)


def summarize_metrics(
    metrics: dict[str, np.ndarray],
    domain_names: Sequence[str] = (),
    *,
    has_diverged: bool = False,
    last_round: int | None = None,
) -> dict[str, Any]:
    """The numbers that stand for a curve.

    diverged: whether the run was `stopped` since its losses, its update or its state were not
    finite, or has curves that say so.

    ended: the round after which a run was ended early, if it was: then the last measured rounds, as
    many, stand for the last ones.

    final_accuracy is the mean of the last five rounds (DynaFed's metric), None if the run
    diverged: it is never averaged in silently. final_accuracy_std is over those rounds.

    Of the running mean over 20 measured rounds (FSL's metrics, section IV-A; None if the run
    diverged): window_accuracy, its last value; rise_time, the first round (from 1) at which it
    reaches 90 % of that; rounds_to_half, the first at which it reaches 0.5, None if it never does.

    Of a data set with domains also best_domains_accuracy, the highest unweighted mean over domains
    (FedAF's metric, Table 2), best_domain_round, the first round (from 1) that reached it, and
    accuracy_<domain> in that round.

    Of clients tested on data like their own also bmta, the highest unweighted mean over clients
    (FedAMP's metric, section 7), bmta_round, the first round (from 1) that reached it,
    bmta_worst_decile, the mean over the worst tenth of clients in that round, and
    final_client_accuracy, the mean over clients and the last five rounds; where clients have names
    (those of domains) also client_accuracy_<name> in the round of bmta. A method without a global
    model has these alone; the others are None.
    """
    name = "test_accuracy"
    if np.isnan(metrics[name]).all() and "mean_client_accuracy" in metrics:
        name = "mean_client_accuracy"
    accuracies = metrics[name]
    diverged = has_diverged or not np.isfinite(metrics["train_loss"][:last_round]).all()
    if last_round is None:
        diverged |= not np.isfinite(accuracies[-1])
    accuracy = metrics["test_accuracy"]
    finite_accuracies = accuracy[np.isfinite(accuracy)]
    last_accuracies = _select_last_values(accuracy, last_round)
    is_undefined = diverged or not len(last_accuracies)
    return {
        "final_accuracy": None if is_undefined else float(last_accuracies.mean()),
        "final_accuracy_std": None if is_undefined else float(last_accuracies.std()),
        "best_accuracy": float(finite_accuracies.max()) if len(finite_accuracies) else None,
        "last_accuracy": None
        if is_undefined
        else float(accuracy[-1] if last_round is None else last_accuracies[-1]),
        **_summarize_rise(accuracy, is_undefined),
        "diverged": bool(diverged),
        **_summarize_domains(metrics, domain_names),
        **_summarize_clients(metrics, diverged, last_round),
    }


def _select_last_values(curve: np.ndarray, last_round: int | None) -> np.ndarray:
    """What was measured in the last five rounds; of a run that was ended early, the last five that
    were measured."""
    if last_round is not None:
        curve = curve[np.isfinite(curve)]
    return curve[-5:][np.isfinite(curve[-5:])]


def _summarize_rise(accuracy: np.ndarray, is_undefined: bool) -> dict[str, Any]:
    if is_undefined:
        return dict.fromkeys(("window_accuracy", "rise_time", "rounds_to_half"))
    means = rolling_mean(accuracy)
    return {
        "window_accuracy": float(means[np.isfinite(means)][-1]),
        "rise_time": rise_time(accuracy),
        "rounds_to_half": rounds_to_reach(accuracy, 0.5),
    }


def _summarize_clients(
    metrics: dict[str, np.ndarray], diverged: bool, last_round: int | None
) -> dict[str, Any]:
    if "client_accuracy" not in metrics:
        return {}
    mean = metrics["mean_client_accuracy"]
    by_name = [name for name in metrics if name.startswith("client_accuracy_")]
    if not np.isfinite(mean).any():
        names = ("bmta", "bmta_round", "bmta_worst_decile", "final_client_accuracy", *by_name)
        return dict.fromkeys(names)
    # A round counts where all clients with a test were measured, see `accounts.curves_of`.
    complete_rounds = np.where(np.isfinite(mean)[:, None], metrics["client_accuracy"], np.nan)
    accuracy, best_round = best_mean_accuracy(complete_rounds)
    last_values = _select_last_values(mean, last_round)
    return {
        "bmta": accuracy,
        "bmta_round": best_round,
        "bmta_worst_decile": worst_decile(metrics["client_accuracy"][best_round - 1]),
        "final_client_accuracy": None
        if diverged or not len(last_values)
        else float(last_values.mean()),
        **{name: float(metrics[name][best_round - 1]) for name in by_name},
    }


def _summarize_domains(metrics, domain_names: Sequence[str]) -> dict[str, Any]:
    if not domain_names:
        return {}
    mean = metrics["test_accuracy_domains"]
    has_values = np.isfinite(mean).any()
    best_index = int(np.nanargmax(mean)) if has_values else 0
    values = {"best_domains_accuracy": mean[best_index]}
    values |= {
        f"accuracy_{name}": metrics[f"test_accuracy_{name}"][best_index] for name in domain_names
    }
    return {
        "best_domain_round": best_index + 1 if has_values else None,
        **{name: float(value) if has_values else None for name, value in values.items()},
    }
