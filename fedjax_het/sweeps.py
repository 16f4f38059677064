"""Many runs, and their results on disk.

A run's files are named by the digest of its settings (`Result.save`). So a folder of results can
be added to by any number of programs, a rerun makes only what is missing, and tables and figures
are functions of the folder alone.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_het.environment import environment, run_digest
from fedjax_het.errors import ConfigError
from fedjax_het.files import make_output_directory
from fedjax_het.result import Result
from fedjax_het.spec import RunSpec
from fedjax_het.store import is_done


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
    made_in = environment()
    named = {run_digest(spec.digest(), made_in): spec for spec in specs}
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
