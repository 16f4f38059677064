"""Results as a reader wants them: in a few words, as HTML, as pictures, as tables with labels."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.utils.errors import ConfigError, require, require_name
from fedjax_het.utils.text import (
    MISSING,
    escape_html,
    escape_mathtext,
    format_classes_per_client,
    to_one_line,
)

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

# What may be against what, and what it is called there.
_LABELS = {
    "round": "Round",
    "bytes": "Bytes moved, up and down",
    "test_accuracy": "Test accuracy (%)",
    "mean_client_accuracy": "Accuracy on clients' own tests (%), mean",
    "test_loss": "Test loss (nats)",
    "train_loss": "Training loss (nats)",
    "update_norm": "Norm of the update",
}
_SPARKLINE_WIDTH, _SPARKLINE_HEIGHT = 160, 36  # of a curve in a line, pixels


class DisplayedResult(Protocol):
    """The part of a `runtime.results.Result` that is displayed; that module imports this one."""

    spec: RunSpec
    metrics: dict[str, np.ndarray]
    summary: dict[str, Any]
    artifacts: dict[str, np.ndarray]

    def digest(self) -> str:
        """Return the name of the result's files."""
        ...


def format_settings(spec: RunSpec) -> str:
    """What is run, in a line."""
    parts = [f"{spec.algorithm} on {spec.dataset}", f"partition {spec.partition}"]
    if spec.alpha is not None:
        parts[-1] += f" (alpha {spec.alpha:g})"
    if spec.classes is not None:
        parts[-1] += f" ({format_classes_per_client(spec.classes)})"
    parts.append(f"{spec.model}" + (f" of width {spec.width}" if spec.width else ""))
    parts += [f"{spec.num_clients} clients", f"{spec.rounds} rounds", f"seed {spec.seed}"]
    return to_one_line(", ".join(parts))


def format_outcome(result: DisplayedResult) -> str:
    """How it ended, in a line."""
    summary = result.summary
    if summary.get("diverged"):
        return f"diverged in round {summary.get('rounds')}"
    parts = []
    for name, label in (
        ("final_accuracy", "final accuracy"),
        ("best_accuracy", "best"),
        ("bmta", "best mean of clients' own tests"),
    ):
        if summary.get(name) is not None:
            parts.append(f"{label} {summary[name]:.2%}".replace("%", " %"))
    if summary.get("stopped_early"):
        parts.append(f"stopped after round {summary.get('rounds')}")
    if summary.get("wall_seconds") is not None:
        parts.append(f"{summary['wall_seconds']:.1f} s")
    return ", ".join(parts) or "nothing measured"


def format_result(result: DisplayedResult) -> str:
    """Two lines, without arrays."""
    return f"Result({format_settings(result.spec)}\n       {format_outcome(result)})"


def format_result_html(result: DisplayedResult) -> str:
    """A small table with the curve of the accuracy; foreign text in it is text."""
    summary = result.summary
    rows = [
        ("setting", escape_html(format_settings(result.spec))),
        ("outcome", escape_html(format_outcome(result))),
        ("accuracy by round", _draw_sparkline(result.metrics[get_accuracy_curve_name(result)])),
        (
            "sent up, down",
            _format_bytes(summary.get("bytes_up"))
            + ", "
            + _format_bytes(summary.get("bytes_down")),
        ),
        ("artifacts", escape_html(", ".join(result.artifacts) or MISSING)),
    ]
    cells = "".join(
        f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{value}</td></tr>'
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def _format_bytes(count: float | None) -> str:
    if count is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _draw_sparkline(values: np.ndarray) -> str:
    """A curve as SVG, between its least and its greatest value."""
    rounds = np.flatnonzero(np.isfinite(values))
    if len(rounds) < 2:
        return MISSING
    low, high = float(values[rounds].min()), float(values[rounds].max())
    x_positions = 1 + (_SPARKLINE_WIDTH - 2) * rounds / max(len(values) - 1, 1)
    y_positions = 1 + (_SPARKLINE_HEIGHT - 2) * (1 - (values[rounds] - low) / max(high - low, 1e-9))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(x_positions, y_positions, strict=True))
    return (
        f'<svg width="{_SPARKLINE_WIDTH}" height="{_SPARKLINE_HEIGHT}" role="img" '
        f'aria-label="from {low:.1%} to {high:.1%}"><polyline fill="none" stroke="#0072B2" '
        f'stroke-width="1.5" points="{points}"/></svg> {low:.1%} to {high:.1%}'
    )


def get_accuracy_curve_name(result: DisplayedResult) -> str:
    """The accuracy that stands for a run."""
    accuracy = result.metrics["test_accuracy"]
    if np.isnan(accuracy).all() and "mean_client_accuracy" in result.metrics:
        return "mean_client_accuracy"
    return "test_accuracy"


def plot_metric(
    result: DisplayedResult,
    metric: str | None = None,
    *,
    x: Literal["round", "bytes"] = "round",
    axes: "Axes | None" = None,
) -> "Axes":
    """A curve of a run, drawn into `axes` or a new figure. metric: one of `result.metrics` with a
    value by round (default: its accuracy). Raises ConfigError."""
    import matplotlib.pyplot as plt

    curves = [name for name, values in result.metrics.items() if values.ndim == 1]
    metric = get_accuracy_curve_name(result) if metric is None else metric
    require_name("metric", metric, curves)
    require_name("x", x, ("round", "bytes"))
    if axes is None:
        _, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    values = result.metrics[metric]
    is_percentage = "accuracy" in metric
    if x == "round":
        positions = np.arange(1, len(values) + 1)
    else:
        positions = np.cumsum(result.metrics["bytes_up"] + result.metrics["bytes_down"])
    is_measured = np.isfinite(values)
    name = result.spec.algorithm
    color = METHODS[name].color if name in METHODS else ""
    axes.plot(
        positions[is_measured],
        (100 if is_percentage else 1) * values[is_measured],
        color=color or "#0072B2",
        label=escape_mathtext(f"{name}, seed {result.spec.seed}"),
    )
    axes.set_xlabel(_LABELS[x])
    axes.set_ylabel(escape_mathtext(_LABELS.get(metric, metric.replace("_", " "))))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def build_rounds_dataframe(result: DisplayedResult) -> "pd.DataFrame":
    """One row per round, numbered from 1, and a column per metric with one value a round."""
    import pandas as pd

    curves = {name: values for name, values in result.metrics.items() if values.ndim == 1}
    rounds = len(next(iter(curves.values()), ()))
    return pd.DataFrame(curves, index=pd.RangeIndex(1, rounds + 1, name="round"))


def build_rounds_dataset(result: DisplayedResult) -> "xr.Dataset":
    """All metrics, with the dimensions round and client (or, of what else there is, `<metric>_1`
    and so on); settings and summary are attributes, as JSON. Raises ConfigError where xarray is not
    installed."""
    xarray = _import_xarray()
    rounds = len(result.metrics["train_loss"])
    arrays = {
        name: (("round", *_name_dimensions(name, values)), values)
        for name, values in result.metrics.items()
    }
    attributes = {
        "settings": json.dumps(result.spec.to_dict(), default=str),
        "summary": json.dumps(result.summary, default=str),
    }
    return xarray.Dataset(arrays, {"round": np.arange(1, rounds + 1)}, attributes)


def build_runs_dataset(results: Sequence[DisplayedResult]) -> "xr.Dataset":
    """The same of several runs with the dimension run, by the digests of their files; settings that
    differ are coordinates of it. Runs with fewer rounds are NaN after them."""
    xarray = _import_xarray()
    require(len(results) > 0, "results", "none", "at least one that was made")
    datasets = [build_rounds_dataset(result).drop_attrs() for result in results]
    names = [result.digest() for result in results]
    runs = xarray.concat(
        datasets, dim=xarray.Variable("run", names), join="outer", data_vars="all", coords="minimal"
    )
    flat_settings = [_flatten_settings(result.spec) for result in results]
    for name in dict.fromkeys(key for settings in flat_settings for key in settings):
        values = [settings.get(name) for settings in flat_settings]
        if len(set(map(str, values))) > 1:
            is_scalar = all(isinstance(value, int | float | str) for value in values)
            runs = runs.assign_coords(
                {name: ("run", values if is_scalar else list(map(str, values)))}
            )
    return runs


def _flatten_settings(spec: RunSpec) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in spec.to_dict().items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": option for key, option in value.items()}
        else:
            flat[name] = value
    return flat


def _name_dimensions(name: str, values: np.ndarray) -> tuple[str, ...]:
    """Of a metric, after rounds."""
    if name == "client_accuracy":
        return ("client",)
    return tuple(f"{name}_{i}" for i in range(1, values.ndim))


def _import_xarray() -> Any:
    try:
        import xarray
    except ImportError as error:
        raise ConfigError(
            'xarray = not installed: expected the extra, pip install "fedjax_het[xarray]"'
        ) from error
    return xarray
