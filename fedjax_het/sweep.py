"""Many runs, and their results on disk.

A run's files are named by the digest of its settings (`Result.save`). So a folder of results can
be added to by any number of programs, a rerun makes only what is missing, and tables and figures
are functions of the folder alone.
"""

import os
import re
import shutil
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.errors import ConfigError
from fedjax_het.files import make_output_directory
from fedjax_het.result import Result
from fedjax_het.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

_RUN_FILE = re.compile(r"[0-9a-f]{16}\.json")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def run_missing(
    specs: Sequence[RunSpec],
    directory: str | os.PathLike,
    *,
    simulate: Callable[..., Result] | None = None,
    progress: Callable[[str], None] = print,
) -> dict[str, str]:
    """Make every run of `specs` that `directory` does not hold yet, saving each as it is made.

    All settings are checked before the first run. A run that was stopped goes on from its last
    checkpoint, kept in `directory/unfinished` until it is done. A run whose data or optional
    package is missing does not stop the others: its reason is told once and returned under its
    digest. Every other error is raised.

    `simulate` is called as `fedjax_het.simulate` is; `progress` gets one line per run, and one for
    what needed no run. In a terminal the run in progress is shown besides, on standard error.
    """
    if simulate is None:
        from fedjax_het import simulate
    named = {spec.digest(): spec for spec in specs}
    directory = make_output_directory(directory)
    missing = {digest: spec for digest, spec in named.items() if not is_done(directory, digest)}
    if done := len(named) - len(missing):
        progress(f"{done} of {len(named)} runs are in {directory} already")
    reasons: dict[str, str] = {}
    seconds: dict[tuple, list[float]] = {}
    for number, (digest, spec) in enumerate(missing.items(), start=1):
        label = f"[{number}/{len(missing)}] {describe(spec)}"
        unfinished = directory / "unfinished" / digest
        start = time.perf_counter()
        try:
            with _Status(label) as status:
                result = simulate(spec, output_dir=unfinished, resume=True, progress=status.show)
        except (ConfigError, FileNotFoundError, ImportError) as error:
            # The settings were checked above: what can still be wrong in this way is the data.
            reason = " ".join(str(error).split())
            if reason not in reasons.values():
                progress(f"{label}: not run: {reason}")
            reasons[digest] = reason
            continue
        result.save(directory)
        shutil.rmtree(unfinished, ignore_errors=True)
        seconds.setdefault(_kind(spec), []).append(time.perf_counter() - start)
        left = _time_to_go(list(missing.values())[number:], seconds)
        outcome = _outcome(result.summary)
        progress(f"{label}: {outcome} in {_clock(seconds[_kind(spec)][-1])}; {left}")
    return reasons


def is_done(directory: str | os.PathLike, digest: str) -> bool:
    """Whether the run's files are there and can be read in full."""
    try:
        Result.load(Path(directory) / f"{digest}.json")
    except _UNREADABLE:
        return False
    return True


def load_results(directory: str | os.PathLike) -> "pd.DataFrame":
    """One row per run: `digest`, the settings (`hp.prox_mu`, `options.preset`), the summary.

    Where a summary repeats a setting (`algorithm`, `seed`), the setting stands. A run whose files
    cannot be read is left out with a warning.
    """
    import pandas as pd

    rows = [
        {"digest": digest, **_flat(result.summary), **_flat(result.spec.to_dict())}
        for digest, result in _results(directory)
    ]
    return pd.DataFrame(rows)


def load_curves(directory: str | os.PathLike) -> "pd.DataFrame":
    """One row per run and round: `digest`, `round` (from 1), and a column per metric `[rounds]`.

    Metrics of another shape (per client, per class) are left to `Result.load`.
    """
    import pandas as pd

    frames = []
    for digest, result in _results(directory):
        curves = {name: values for name, values in result.metrics.items() if values.ndim == 1}
        rounds = len(next(iter(curves.values()), ()))
        frames.append(pd.DataFrame({"digest": digest, "round": np.arange(1, rounds + 1), **curves}))
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


def _results(directory: str | os.PathLike) -> Iterator[tuple[str, Result]]:
    for path in sorted(Path(directory).glob("*.json")):
        if not _RUN_FILE.fullmatch(path.name):
            continue
        try:
            yield path.stem, Result.load(path)
        except _UNREADABLE as error:
            warnings.warn(f"{path} is left out: it cannot be read ({error})", stacklevel=3)


def _flat(values: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


class _Status:
    """The run in progress as one transient line of a terminal; nothing elsewhere."""

    def __init__(self, label: str):
        from rich.console import Console

        self._label = label
        self._status = Console(stderr=True, highlight=False).status(label)

    def __enter__(self) -> "_Status":
        self._status.start()
        return self

    def __exit__(self, *exception) -> None:
        self._status.stop()

    def show(self, progress: Any) -> None:
        """Takes what `simulate` hands to its `progress`."""
        from fedjax_het.progress import describe as describe_progress

        done = f"{progress.phase} {progress.done}/{progress.total}"
        self._status.update(f"{self._label}: {done}, {describe_progress(progress)}")


def _kind(spec: RunSpec) -> tuple:
    return spec.algorithm, spec.dataset, spec.model, spec.width


def _time_to_go(left: list[RunSpec], seconds: dict[tuple, list[float]]) -> str:
    """As the last run of the same kind (the first also compiled), else the mean of all so far."""
    if not left:
        return "done"
    made = [value for values in seconds.values() for value in values]
    estimate = sum(seconds.get(_kind(spec), [np.mean(made)])[-1] for spec in left)
    return f"about {_clock(estimate)} to go"


def _clock(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _outcome(summary: dict) -> str:
    if summary.get("diverged"):
        return "diverged"
    return f"{100 * summary['final_accuracy']:.2f} %"
