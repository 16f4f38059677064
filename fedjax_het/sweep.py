"""Many runs, and their results on disk.

A run's files are named by the digest of its settings: `<digest>.json` holds `{"spec": ...,
"summary": ...}`, `<digest>.npz` one array `[rounds]` per metric. So a folder of results can be
added to by any number of programs, a rerun makes only what is missing, and tables and figures are
functions of the folder alone.
"""

import json
import os
import re
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.errors import ConfigError, require
from fedjax_het.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

_RUN_FILE = re.compile(r"[0-9a-f]{16}\.json")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)


def run_missing(
    specs: Sequence[RunSpec],
    directory: str | os.PathLike,
    *,
    simulate: Callable[[RunSpec], Any] | None = None,
    progress: Callable[[str], None] = print,
) -> dict[str, str]:
    """Make every run of `specs` that `directory` does not hold yet, saving each as it is made.

    All specs are checked before the first one runs. A run whose data or optional package is
    missing does not stop the others: its reason is told once and returned under its digest. Every
    other error is raised. `simulate(spec)` returns a result with `summary` and `save(directory)`;
    `progress` receives one line per run and one for what needed no run.
    """
    if simulate is None:
        from fedjax_het.simulate import simulate
    named = {spec.digest(): spec for spec in specs}
    directory = make_output_directory(directory)
    missing = {digest: spec for digest, spec in named.items() if not is_done(directory, digest)}
    if done := len(named) - len(missing):
        progress(f"{done} of {len(named)} runs are in {directory} already")
    reasons: dict[str, str] = {}
    seconds: dict[tuple, list[float]] = {}
    for number, (digest, spec) in enumerate(missing.items(), start=1):
        label = f"[{number}/{len(missing)}] {describe(spec)}"
        start = time.perf_counter()
        try:
            result = simulate(spec)
        except (ConfigError, FileNotFoundError, ImportError) as error:
            # The spec itself was checked above: what is left to fail this way is the data.
            reason = " ".join(str(error).split())
            if reason not in reasons.values():
                progress(f"{label}: not run: {reason}")
            reasons[digest] = reason
            continue
        result.save(directory)
        seconds.setdefault(_kind(spec), []).append(time.perf_counter() - start)
        left = _time_to_go(list(missing.values())[number:], seconds)
        outcome = _outcome(result.summary)
        progress(f"{label}: {outcome} in {_clock(seconds[_kind(spec)][-1])}; {left}")
    return reasons


def make_output_directory(directory: str | os.PathLike) -> Path:
    """The folder, made if it is not there. `ConfigError` if files cannot be written into it."""
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError:
        writable = False
    require(writable, "output_dir", str(directory), "a folder that can be made and written to")
    return directory


def is_done(directory: str | os.PathLike, digest: str) -> bool:
    """Whether both files of the run are there and can be read in full."""
    try:
        _read_record(Path(directory) / f"{digest}.json")
        _read_metrics(Path(directory) / f"{digest}.npz")
    except _UNREADABLE:
        return False
    return True


def load_results(directory: str | os.PathLike) -> "pd.DataFrame":
    """One row per run: `digest`, the settings (`hp.prox_mu`, `options.preset`), the summary.

    A summary value under a setting's name (`algorithm`, `seed`) is left out: the setting says it.
    A file that cannot be read is left out with a warning.
    """
    import pandas as pd

    rows = []
    for path in _run_files(directory):
        try:
            record = _read_record(path)
        except _UNREADABLE as error:
            warnings.warn(f"{path} is left out: it cannot be read ({error})", stacklevel=2)
            continue
        rows.append({"digest": path.stem, **_flat(record["summary"]), **_flat(record["spec"])})
    return pd.DataFrame(rows)


def load_curves(directory: str | os.PathLike) -> "pd.DataFrame":
    """One row per run and round: `digest`, `round` (from 1), and a column per metric `[rounds]`.

    Metrics of another shape (per client, per class) are left to whoever opens the NPZ file.
    """
    import pandas as pd

    frames = []
    for path in _run_files(directory):
        try:
            metrics = _read_metrics(path.with_suffix(".npz"))
        except _UNREADABLE as error:
            warnings.warn(f"{path.stem}.npz is left out: it cannot be read ({error})", stacklevel=2)
            continue
        curves = {name: values for name, values in metrics.items() if values.ndim == 1}
        rounds = len(next(iter(curves.values()), ()))
        frames.append(
            pd.DataFrame({"digest": path.stem, "round": np.arange(1, rounds + 1), **curves})
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def describe(spec: RunSpec) -> str:
    """A run in a few words, for status lines: what it is, not every setting."""
    parts = [spec.algorithm, spec.dataset]
    if spec.model:
        parts.append(spec.model + (f" width {spec.width}" if spec.width else ""))
    if spec.alpha is not None:
        parts.append(f"alpha {spec.alpha:g}")
    if spec.classes is not None:
        parts.append(f"{spec.classes} classes a client")
    return ", ".join([*parts, f"seed {spec.seed}"])


def _run_files(directory: str | os.PathLike) -> Iterable[Path]:
    return sorted(p for p in Path(directory).glob("*.json") if _RUN_FILE.fullmatch(p.name))


def _read_record(path: Path) -> dict[str, dict]:
    record = json.loads(path.read_text())
    return {"spec": dict(record["spec"]), "summary": dict(record["summary"])}


def _read_metrics(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _flat(values: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _kind(spec: RunSpec) -> tuple:
    return spec.algorithm, spec.dataset, spec.model, spec.width


def _time_to_go(left: list[RunSpec], seconds: dict[tuple, list[float]]) -> str:
    """From the runs made so far: those of the same kind where there are any, else all."""
    if not left:
        return "done"
    made = [value for values in seconds.values() for value in values]
    estimate = sum(np.mean(seconds.get(_kind(spec), made)) for spec in left)
    return f"about {_clock(estimate)} to go"


def _clock(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _outcome(summary: dict) -> str:
    if summary.get("diverged"):
        return "diverged"
    return f"{100 * summary['final_accuracy']:.2f} %"
