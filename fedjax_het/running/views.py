"""Results as a reader wants them: in a few words, as HTML, as pictures, as tables with labels."""

import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.common.errors import ConfigError, require, require_name
from fedjax_het.common.pictures import plain_axes
from fedjax_het.common.text import MISSING, classes_text, figure_text, html_text, one_line
from fedjax_het.settings.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

    from fedjax_het.running.result import Result

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
_WIDTH, _HEIGHT = 160, 36  # of a curve in a line, pixels


def setting_of(spec: RunSpec) -> str:
    """What is run, in a line."""
    parts = [f"{spec.algorithm} on {spec.dataset}", f"partition {spec.partition}"]
    if spec.alpha is not None:
        parts[-1] += f" (alpha {spec.alpha:g})"
    if spec.classes is not None:
        parts[-1] += f" ({classes_text(spec.classes)})"
    parts.append(f"{spec.model}" + (f" of width {spec.width}" if spec.width else ""))
    parts += [f"{spec.num_clients} clients", f"{spec.rounds} rounds", f"seed {spec.seed}"]
    return one_line(", ".join(parts))


def outcome_of(result: "Result") -> str:
    """How it ended, in a line."""
    summary = result.summary
    if summary.get("diverged"):
        return f"diverged in round {summary.get('rounds')}"
    parts = []
    for name, words in (
        ("final_accuracy", "final accuracy"),
        ("best_accuracy", "best"),
        ("bmta", "best mean of clients' own tests"),
    ):
        if summary.get(name) is not None:
            parts.append(f"{words} {summary[name]:.2%}".replace("%", " %"))
    if summary.get("stopped_early"):
        parts.append(f"stopped after round {summary.get('rounds')}")
    if summary.get("wall_seconds") is not None:
        parts.append(f"{summary['wall_seconds']:.1f} s")
    return ", ".join(parts) or "nothing measured"


def described(result: "Result") -> str:
    """Two lines, without arrays."""
    return f"Result({setting_of(result.spec)}\n       {outcome_of(result)})"


def as_html(result: "Result") -> str:
    """A small table with the curve of the accuracy; foreign text in it is text."""
    summary = result.summary
    rows = [
        ("setting", html_text(setting_of(result.spec))),
        ("outcome", html_text(outcome_of(result))),
        ("accuracy by round", _sparkline(result.metrics[measured_curve(result)])),
        (
            "sent up, down",
            _bytes(summary.get("bytes_up")) + ", " + _bytes(summary.get("bytes_down")),
        ),
        ("artifacts", html_text(", ".join(result.artifacts) or MISSING)),
    ]
    cells = "".join(
        f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{value}</td></tr>'
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def _bytes(count: float | None) -> str:
    if count is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _sparkline(values: np.ndarray) -> str:
    """A curve as SVG, between its least and its greatest value."""
    rounds = np.flatnonzero(np.isfinite(values))
    if len(rounds) < 2:
        return MISSING
    low, high = float(values[rounds].min()), float(values[rounds].max())
    across = 1 + (_WIDTH - 2) * rounds / max(len(values) - 1, 1)
    down = 1 + (_HEIGHT - 2) * (1 - (values[rounds] - low) / max(high - low, 1e-9))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="from {low:.1%} to {high:.1%}"><polyline fill="none" stroke="#0072B2" '
        f'stroke-width="1.5" points="{points}"/></svg> {low:.1%} to {high:.1%}'
    )


def measured_curve(result: "Result") -> str:
    """The accuracy that stands for a run."""
    overall = result.metrics["test_accuracy"]
    if np.isnan(overall).all() and "mean_client_accuracy" in result.metrics:
        return "mean_client_accuracy"
    return "test_accuracy"


def plotted(
    result: "Result",
    metric: str | None = None,
    *,
    x: Literal["round", "bytes"] = "round",
    axes: "Axes | None" = None,
) -> "Axes":
    """A curve of a run, drawn into `axes` or a new figure. metric: one of `result.metrics` with a
    value by round (default: its accuracy). Raises ConfigError."""
    import matplotlib.pyplot as plt

    curves = [name for name, values in result.metrics.items() if values.ndim == 1]
    metric = measured_curve(result) if metric is None else metric
    require_name("metric", metric, curves)
    require_name("x", x, ("round", "bytes"))
    if axes is None:
        _, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    values = result.metrics[metric]
    share = "accuracy" in metric
    if x == "round":
        across = np.arange(1, len(values) + 1)
    else:
        across = np.cumsum(result.metrics["bytes_up"] + result.metrics["bytes_down"])
    seen = np.isfinite(values)
    name = result.spec.algorithm
    colour = METHODS[name].colour if name in METHODS else ""
    axes.plot(
        across[seen],
        (100 if share else 1) * values[seen],
        color=colour or "#0072B2",
        label=figure_text(f"{name}, seed {result.spec.seed}"),
    )
    axes.set_xlabel(_LABELS[x])
    axes.set_ylabel(figure_text(_LABELS.get(metric, metric.replace("_", " "))))
    plain_axes(axes)
    return axes


def rounds_frame(result: "Result") -> "pd.DataFrame":
    """One row per round, numbered from 1, and a column per metric with one value a round."""
    import pandas as pd

    curves = {name: values for name, values in result.metrics.items() if values.ndim == 1}
    rounds = len(next(iter(curves.values()), ()))
    return pd.DataFrame(curves, index=pd.RangeIndex(1, rounds + 1, name="round"))


def rounds_dataset(result: "Result") -> "xr.Dataset":
    """All metrics, with the dimensions round and client (or, of what else there is, `<metric>_1`
    and so on); settings and summary are attributes, as JSON. Raises ConfigError where xarray is not
    installed."""
    xarray = _xarray()
    rounds = len(result.metrics["train_loss"])
    arrays = {
        name: (("round", *_dimensions(name, values)), values)
        for name, values in result.metrics.items()
    }
    attributes = {
        "settings": json.dumps(result.spec.to_dict(), default=str),
        "summary": json.dumps(result.summary, default=str),
    }
    return xarray.Dataset(arrays, {"round": np.arange(1, rounds + 1)}, attributes)


def runs_dataset(results: "list[Result]") -> "xr.Dataset":
    """The same of several runs with the dimension run, by the digests of their files; settings that
    differ are coordinates of it. Runs with fewer rounds are NaN after them."""
    xarray = _xarray()
    require(len(results) > 0, "results", "none", "at least one that was made")
    made = [rounds_dataset(result).drop_attrs() for result in results]
    names = [result.digest() for result in results]
    runs = xarray.concat(
        made, dim=xarray.Variable("run", names), join="outer", data_vars="all", coords="minimal"
    )
    flat = [_flat_settings(result.spec) for result in results]
    for name in dict.fromkeys(key for own in flat for key in own):
        values = [own.get(name) for own in flat]
        if len(set(map(str, values))) > 1:
            plain = all(isinstance(value, int | float | str) for value in values)
            runs = runs.assign_coords({name: ("run", values if plain else list(map(str, values)))})
    return runs


def _flat_settings(spec: RunSpec) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in spec.to_dict().items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": own for key, own in value.items()}
        else:
            flat[name] = value
    return flat


def _dimensions(name: str, values: np.ndarray) -> tuple[str, ...]:
    """Of a metric, after rounds."""
    if name == "client_accuracy":
        return ("client",)
    return tuple(f"{name}_{i}" for i in range(1, values.ndim))


def _xarray() -> Any:
    try:
        import xarray
    except ImportError as error:
        raise ConfigError(
            'xarray = not installed: expected the extra, pip install "fedjax_het[xarray]"'
        ) from error
    return xarray
