"""Results as text, HTML and arrays with named dimensions."""

import functools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from markupsafe import Markup

from fedjax_het.algorithms import METHODS
from fedjax_het.config.kind_settings import KIND_SETTINGS
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS, SETTINGS_BY_HYPERPARAMETER
from fedjax_het.core.optimizers import OPTIMIZERS
from fedjax_het.data.dataset_registry import DATASETS, require_dataset_name
from fedjax_het.nn.networks import NETWORKS
from fedjax_het.tasks.wording import get_score_name
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.text import (
    MISSING,
    format_classes_per_client,
    make_html_table,
    to_one_line,
)

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.lines import Line2D

DEFAULT_COLOR = "#0072B2"
"""Color of a curve of a method without a color."""
TEST_SPLIT_ADVICE = "stopped on the test split, pass validation=0.1"
"""Notice for a run that a stopping rule ended by its test accuracy."""
# Settings that the label of a run names where they are not the defaults.
_LABEL_SETTINGS = (
    *("algorithm", "dataset", "model", "width", "alpha", "classes", "options", "hp"),
    *HYPERPARAMETER_SETTINGS,
    *("partition_options", *KIND_SETTINGS, "network_options", "optimizer_options", "server_data"),
    "server_options",
    *(
        "local_epochs",
        "lr_schedule",
        "compression",
        "held_out_clients",
        "client_test_model",
        "protocol",
        "seed",
    ),
)
# Curves of shape [rounds, clients].
_CLIENT_CURVES = ("client_accuracy", "client_train_loss", "candidate_loss")
_SPARKLINE_WIDTH, _SPARKLINE_HEIGHT = 160, 36  # pixels


class DisplayedResult(Protocol):
    """The part of a `runtime.results.Result` that is displayed."""

    spec: RunSpec
    metrics: dict[str, np.ndarray]
    summary: dict[str, Any]
    artifacts: dict[str, np.ndarray]

    def digest(self) -> str:
        """Return the name of the result's files."""
        ...


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names.

    Args:
      values: values and dictionaries by name.
      prefix: text before every name.

    Returns:
      The values that are no dictionaries.

    Example:
      >>> from fedjax_het.runtime.result_display import flatten
      >>> flatten({"seed": 0, "hp": {"prox_mu": 0.1}})
      {'seed': 0, 'hp.prox_mu': 0.1}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{name}.") if is_nested else {prefix + name: value}
    return flat


def to_json_value(value: Any) -> Any:
    """Return a value that JSON can hold; the function accepts every value.

    Arrays and scalars of NumPy and jax become lists and numbers of Python, infinite numbers and NaN
    become None, and other objects become their `repr`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.runtime.result_display import to_json_value
      >>> to_json_value({"loss": np.float32(0.5), "values": (1, float("nan"))})
      {'loss': 0.5, 'values': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, bool | int | str) or value is None else repr(value)


def name_data(spec: RunSpec, summary: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the names of a run's data set and partition; objects of the user have a digest.

    Settings name other data and another partition than the user's objects, so an object's name
    contains its digest only.

    Args:
      spec: settings of the run.
      summary: summary of its result, or its `user_digests`.

    Returns:
      `dataset` and `partition`.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.runtime.result_display import name_data
      >>> name_data(RunSpec("fedavg", "digits", partition="iid"), {"own_dataset": "0123456789"})
      {'dataset': 'own 01234567', 'partition': 'iid'}
    """
    names: dict[str, str | None] = {"dataset": spec.dataset, "partition": spec.partition}
    for part in names:
        if digest := summary.get(f"own_{part}"):
            names[part] = f"own {str(digest)[:8]}"
    return names


def list_varying_settings(specs: Iterable[RunSpec]) -> list[str]:
    """List the settings in which runs differ, in the order of `RunSpec`.

    Args:
      specs: settings of the runs.

    Returns:
      Names of fields of `RunSpec`, and of its dictionaries with dots, such as `hp.prox_mu`.

    Example:
      >>> from fedjax_het import grid
      >>> from fedjax_het.runtime.result_display import list_varying_settings
      >>> list_varying_settings(grid(algorithm="fedavg", batch_size=[32, 64], model="mlp"))
      ['batch_size']
    """
    values: dict[str, set[str]] = {}
    for spec in specs:
        for name, value in flatten(vars(spec)).items():
            follows_seed = name == "partition_seed" and value == spec.seed
            values.setdefault(name, set()).add("" if follows_seed else str(value))
    return [name for name, texts in values.items() if len(texts) > 1]


def _describe_varying(spec: RunSpec, varying: Sequence[str], named: Collection[str]) -> list[str]:
    """Describe the varying settings that a text does not name already."""
    values = {name: value for name, value in flatten(vars(spec)).items() if value is not None}
    return [
        f"{name.split('.', 1)[-1]} {_format_value(values[name])}"
        for name in varying
        if name in values and name not in named and name.split(".")[0] not in named
    ]


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_settings(spec: RunSpec, summary: Mapping[str, Any], varying: Sequence[str] = ()) -> str:
    """Return the main settings of a run in one line.

    Args:
      spec: settings of the run.
      summary: summary of its result, which marks the user's data.
      varying: further settings to name, see `list_varying_settings`.

    Returns:
      One line.
    """
    names = name_data(spec, summary)
    parts = [f"{spec.algorithm} on {names['dataset']}", f"partition {names['partition']}"]
    is_named = "own_partition" not in summary
    if is_named and spec.alpha is not None:
        parts[-1] += f" (alpha {spec.alpha:g})"
    if is_named and spec.classes is not None:
        parts[-1] += f" ({format_classes_per_client(spec.classes)})"
    parts.append(f"{spec.model}" + (f" of width {spec.width}" if spec.width else ""))
    parts += [f"{spec.num_clients} clients", f"{spec.rounds} rounds", f"seed {spec.seed}"]
    named = ("algorithm", "dataset", "partition", "alpha", "classes", "model", "width")
    parts += _describe_varying(spec, varying, (*named, "num_clients", "rounds", "seed", "protocol"))
    if spec.protocol is not None:
        parts.append(f"protocol {spec.protocol}")
    return to_one_line(", ".join(parts))


def format_run_label(
    spec: RunSpec,
    user_digests: Mapping[str, Any] = MappingProxyType({}),
    varying: Sequence[str] = (),
) -> str:
    """Return a run in a few words: its protocol and its main settings that are not the defaults.

    Args:
      spec: settings of the run.
      user_digests: digests of the user's data that replace the named data.
      varying: further settings to name, see `list_varying_settings`.

    Returns:
      One line.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.runtime.result_display import format_run_label
      >>> format_run_label(RunSpec("fedprox", "digits", model="mlp", alpha=0.1, hp={"prox_mu": 1}))
      'fedprox, digits, mlp, alpha 0.1, prox_mu 1, seed 0'
    """
    names = name_data(spec, user_digests)
    parts = [spec.algorithm, str(names["dataset"])]
    is_named = "own_partition" not in user_digests
    if not is_named:
        parts.append(f"partition {names['partition']}")
    if spec.model:
        parts.append(spec.model + (f" width {spec.width}" if spec.width else ""))
    if is_named and spec.alpha is not None:
        parts.append(f"alpha {spec.alpha:g}")
    if is_named and spec.classes is not None:
        parts.append(format_classes_per_client(spec.classes))
    # Options are compared with the preset's options, and the preset with the default preset.
    field = METHODS[spec.algorithm].options.PRESET_FIELD
    preset = {name: value for name, value in spec.options.items() if name == field}
    for options, defaults in ((preset, {}), (spec.options, preset)):
        if options:
            default_options = _resolve_defaults(spec, defaults).options
            parts += [f"{n} {v}" for n, v in options.items() if v != default_options.get(n)]
    default_spec = _resolve_defaults(spec, spec.options)
    for name, value in spec.hyperparameters.items():
        if value != default_spec.hyperparameters.get(name):
            parts.append(f"{SETTINGS_BY_HYPERPARAMETER.get(name, name)} {value:g}")
    option_settings = ("partition_options", *KIND_SETTINGS, "network_options", "optimizer_options")
    for field in (*option_settings, "server_options"):
        if field == "server_options" and spec.server_data is not None:
            continue  # the text of the server's data has them
        default_values = getattr(default_spec, field) or {}
        values = getattr(spec, field) or {}
        parts += [f"{n} {v}" for n, v in values.items() if v != default_values.get(n)]
    if spec.local_epochs not in (None, default_spec.local_epochs):
        parts.append(f"{spec.local_epochs} local epochs")
    if spec.lr_schedule is not None:
        parts.append(f"{spec.lr_schedule} rate")
    if spec.compression is not None:
        parts.append(f"compression {spec.compression}")
    if spec.server_data is not None:
        server_options = (spec.server_options or {}).items()
        options_text = ", ".join(f"{n}={v}" for n, v in server_options if v is not None)
        parts.append(f"server data {spec.server_data}{options_text and f'({options_text})'}")
    if spec.held_out_clients is not None:
        parts.append(f"{spec.held_out_clients} clients held out")
    if spec.client_test_model is not None:
        parts.append(f"{spec.client_test_model} models tested")
    parts += _describe_varying(spec, varying, _LABEL_SETTINGS)
    if spec.protocol is not None:
        parts.append(f"protocol {spec.protocol}")
    return to_one_line(", ".join([*parts, f"seed {spec.seed}"]))


def _resolve_defaults(spec: RunSpec, options: dict[str, Any]) -> ResolvedRunSpec:
    """Return the settings of a run that sets nothing but these options of the method."""
    # An unknown data set, of a result from another process, has no defaults.
    dataset = spec.dataset
    try:
        require_dataset_name(dataset)
    except ConfigError:
        dataset = "digits"
    is_constant = spec.algorithm in METHODS.built_in and dataset in DATASETS.built_in
    is_constant &= spec.model in (None, *NETWORKS.built_in)
    is_constant &= spec.local_optimizer in (None, *OPTIMIZERS.built_in)
    resolve = _resolve_defaults_of if is_constant else _resolve_defaults_of.__wrapped__
    choices = (spec.model, spec.protocol, spec.local_optimizer)
    return resolve(spec.algorithm, dataset, json.dumps(options, sort_keys=True), *choices)


@functools.lru_cache(maxsize=256)  # entries of the package do not change
def _resolve_defaults_of(
    algorithm: str,
    dataset: str,
    options: str,
    model: str | None,
    protocol: str | None,
    local_optimizer: str | None,
) -> ResolvedRunSpec:
    return RunSpec(
        algorithm,
        dataset,
        options=json.loads(options),
        model=model,
        protocol=protocol,
        local_optimizer=local_optimizer,
    ).resolved()


def format_outcome(result: DisplayedResult) -> str:
    """Return the accuracies and the duration of a run in one line."""
    summary, parts = result.summary, []
    if summary.get("diverged"):
        return f"diverged in round {summary.get('rounds')}"
    best, best_mean = "best", "best mean of clients' own tests"
    score = get_score_name([summary.get("task")])
    if result.spec.validation is not None:
        best = f"in the round of the best validation {score}"
        best_mean = f"mean of clients' own tests in the round of their best validation {score}"
    for name, label in (
        ("final_accuracy", f"final {score}"),
        ("best_accuracy", best),
        ("final_client_accuracy", "final mean of clients' own tests"),
        ("bmta", best_mean),
    ):
        if summary.get(name) is not None:
            parts.append(f"{label} {100 * summary[name]:.2f} %")
    if stop := summary.get("stopped_early"):
        has_callback = stop["why"] == "callback"
        whole = f" of {result.spec.rounds}, not the whole run" if has_callback else ""
        parts.append(f"stopped after round {summary.get('rounds')}{whole}")
        if not has_callback and result.spec.validation is None:
            parts.append(TEST_SPLIT_ADVICE)
    if summary.get("wall_seconds") is not None:
        parts.append(f"{summary['wall_seconds']:.1f} s")
    if summary.get("simulated_seconds") is not None:
        parts.append(f"{summary['simulated_seconds']:,.0f} s of simulated time")
    return ", ".join(parts) or "nothing measured"


def format_result_html(result: DisplayedResult) -> str:
    """Return an HTML table of settings, outcome and the curve of the score.

    Names from the result are escaped.
    """
    traffic = [_format_bytes(result.summary.get(name)) for name in ("bytes_up", "bytes_down")]
    sparkline = _draw_sparkline(result.metrics[get_accuracy_name(result.metrics)])
    rows = {
        "setting": format_settings(result.spec, result.summary),
        "outcome": format_outcome(result),
        f"{get_score_name([result.summary.get('task')])} by round": Markup(sparkline),
        "sent up, down": ", ".join(traffic),
        "artifacts": ", ".join(result.artifacts) or MISSING,
    }
    return make_html_table(rows.items())


def _format_bytes(count: float | None) -> str:
    if count is None:
        return MISSING
    power = min(int(np.log10(max(count, 1)) // 3), 3)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def _draw_sparkline(values: np.ndarray) -> str:
    """Return a curve as SVG, scaled to its least and greatest value."""
    rounds = np.flatnonzero(np.isfinite(values))
    if len(rounds) < 2:
        return MISSING
    low, high = float(values[rounds].min()), float(values[rounds].max())
    x_positions = 1 + (_SPARKLINE_WIDTH - 2) * rounds / max(len(values) - 1, 1)
    y_positions = 1 + (_SPARKLINE_HEIGHT - 2) * (1 - (values[rounds] - low) / max(high - low, 1e-9))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(x_positions, y_positions, strict=True))
    return (
        f'<svg width="{_SPARKLINE_WIDTH}" height="{_SPARKLINE_HEIGHT}" role="img" '
        f'aria-label="from {low:.1%} to {high:.1%}"><polyline fill="none" stroke="{DEFAULT_COLOR}" '
        f'stroke-width="1.5" points="{points}"/></svg> {low:.1%} to {high:.1%}'
    )


def mark_isolated_points(line: "Line2D") -> None:
    """Draw markers at the values between two gaps, which a line alone does not show."""
    is_value = np.isfinite(np.asarray(line.get_ydata(), np.float64))
    is_neighbor = np.pad(is_value, 1)
    is_isolated = is_value & ~is_neighbor[:-2] & ~is_neighbor[2:]
    if is_isolated.any() and len(is_isolated) > 1:
        line.set(marker=".", markevery=np.flatnonzero(is_isolated).tolist())


def get_accuracy_name(metrics: Mapping[str, np.ndarray]) -> str:
    """Return the name of a run's main accuracy.

    It is the accuracy of the global model, or the mean of clients' own tests without one.
    """
    if np.isnan(metrics["test_accuracy"]).all() and "mean_client_accuracy" in metrics:
        return "mean_client_accuracy"
    return "test_accuracy"


def build_rounds_dataset(result: DisplayedResult) -> "xr.Dataset":
    """Return all metrics of a run with named dimensions.

    The dimensions are round and client; other dimensions are named `<metric>_1` and so on. Settings
    and summary are attributes in JSON.

    Raises:
      ConfigError: if xarray is not installed.
    """
    arrays = {}
    for name, values in result.metrics.items():
        dimensions = [f"{name}_{i}" for i in range(1, values.ndim)]
        arrays[name] = (
            ["round", *(["client"] if name in _CLIENT_CURVES else dimensions)],
            values,
        )
    attributes = {
        "settings": json.dumps(to_json_value(result.spec.to_dict()), allow_nan=False),
        "summary": json.dumps(to_json_value(result.summary), allow_nan=False),
    }
    rounds = np.arange(1, len(result.metrics["train_loss"]) + 1)
    return _import_xarray().Dataset(arrays, {"round": rounds}, attributes)


def build_runs_dataset(results: Iterable[DisplayedResult]) -> "xr.Dataset":
    """Return all metrics of several runs with the dimensions run, round and client.

    Runs are named by their digests. Settings that differ are coordinates of the runs. Metrics are
    NaN after the last round of a run with fewer rounds.

    Raises:
      ConfigError: without results, and if xarray is not installed.
    """
    xarray, results = _import_xarray(), list(results)
    require(len(results) > 0, "results", "none", "at least one result")
    runs = xarray.concat(
        [build_rounds_dataset(result).drop_attrs() for result in results],
        dim=xarray.Variable("run", [result.digest() for result in results]),
        join="outer",
        data_vars="all",
        coords="minimal",
    )
    settings = [
        flatten(result.spec.to_dict()) | name_data(result.spec, result.summary)
        for result in results
    ]
    for name in dict.fromkeys(name for values in settings for name in values):
        column: Sequence[Any] = [values.get(name) for values in settings]
        if len(set(map(str, column))) > 1:
            if not all(isinstance(value, int | float | str) for value in column):
                column = list(map(str, column))
            runs = runs.assign_coords({name: ("run", column)})
    return runs


def _import_xarray() -> Any:
    try:
        import xarray
    except ImportError as error:
        raise ConfigError(
            'xarray = not installed: expected the extra, pip install "fedjax_het[xarray]"'
        ) from error
    return xarray
