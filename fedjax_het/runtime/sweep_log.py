"""Status lines of a sweep: which runs ended, how they ended, and how long the rest may take."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_het.algorithms import METHODS
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.data import DATASETS
from fedjax_het.runtime.progress import format_duration, show_progress
from fedjax_het.runtime.results import Result
from fedjax_het.utils import console
from fedjax_het.utils.text import format_classes_per_client, to_one_line


class Job(NamedTuple):
    """A run of a sweep."""

    spec: ResolvedRunSpec
    """Settings of the run."""
    digest: str
    """Digest that names the files of its result."""
    record: dict | None = None
    """Record of the checkpoint from which it resumes, if there is one."""


def format_run_label(spec: RunSpec) -> str:
    """Return a run in a few words: the settings that differ from the method's defaults.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.runtime.sweep_log import format_run_label
      >>> format_run_label(RunSpec("fedprox", "digits", model="mlp", alpha=0.1, hp={"prox_mu": 1}))
      'fedprox, digits, mlp, alpha 0.1, prox_mu 1, seed 0'
    """
    parts = [spec.algorithm, spec.dataset]
    if spec.model:
        parts.append(spec.model + (f" width {spec.width}" if spec.width else ""))
    if spec.alpha is not None:
        parts.append(f"alpha {spec.alpha:g}")
    if spec.classes is not None:
        parts.append(format_classes_per_client(spec.classes))
    # Options are compared with the preset's options, and the preset with the default preset.
    field = METHODS[spec.algorithm].options.PRESET_FIELD
    preset = {name: value for name, value in spec.options.items() if name == field}
    for options, defaults in ((preset, {}), (spec.options, preset)):
        default_options = _resolve_defaults(spec, defaults).options
        parts += [f"{n} {v}" for n, v in options.items() if v != default_options.get(n)]
    default_spec = _resolve_defaults(spec, spec.options)
    parts += [f"{n} {v:g}" for n, v in spec.hp.items() if v != default_spec.hp.get(n)]
    if spec.local_epochs not in (None, default_spec.local_epochs):
        parts.append(f"{spec.local_epochs} local epochs")
    if spec.lr_schedule is not None:
        parts.append(f"{spec.lr_schedule} rate")
    if spec.server_data is not None:
        options_text = ", ".join(f"{n}={v}" for n, v in (spec.server_options or {}).items())
        parts.append(f"server data {spec.server_data}({options_text})")
    if spec.held_out_clients is not None:
        parts.append(f"{spec.held_out_clients} clients held out")
    if spec.client_test_model is not None:
        parts.append(f"{spec.client_test_model} models tested")
    return to_one_line(", ".join([*parts, f"seed {spec.seed}"]))


def _resolve_defaults(spec: RunSpec, options: dict[str, Any]) -> ResolvedRunSpec:
    """Return the settings of a run that sets nothing but these options of the method."""
    # An unknown data set, of a result from another process, has no defaults.
    dataset = spec.dataset if spec.dataset in DATASETS else "digits"
    choices = {name: getattr(spec, name) for name in ("model", "protocol", "local_optimizer")}
    return RunSpec(spec.algorithm, dataset, options=options, **choices).resolved()


class SweepProgress:
    """Reports of a sweep, a line each.

    The lines go to `progress`, except that `print` respects the output mode of the process, see
    `utils.console`, and None prints nothing.

    Attributes:
      total: number of runs without a result at the start.
      print_line: function that prints a line.
      num_processed: runs that ended, were rejected or were executed by other workers.
      num_finished: runs that this worker executed.
      num_elsewhere: runs that other workers executed.
    """

    def __init__(self, total: int, progress: Callable[[str], None] | None):
        self.total, self.print_line = total, progress or (lambda line: None)
        if progress is print:
            self.print_line = console.print_status
        self._shows_progress = progress is print
        self.num_processed = self.num_finished = self.num_elsewhere = 0
        self._start_time = time.perf_counter()

    def report_existing(self, count: int, num_runs: int, directory: Path | None) -> None:
        """Report results that exist before the sweep.

        Args:
          count: number of these results.
          num_runs: number of runs of the sweep.
          directory: folder of results.
        """
        if count:
            self.print_line(f"{count} of {num_runs} runs are in {directory} already")

    def report_rejected(
        self, jobs: Sequence[Job], reason: str, *, show_reason: bool = True
    ) -> None:
        """Report runs that cannot be executed.

        Args:
          jobs: the runs.
          reason: why.
          show_reason: False if the reason was reported before, so that no line is printed.
        """
        if show_reason:
            self.print_line(f"{self._format_jobs(jobs)}: not run: {reason}")
        self.num_processed += len(jobs)

    def report_lost(self, jobs: Sequence[Job]) -> None:
        """Report runs whose leases another worker has acquired."""
        self.print_line(f"{self._format_jobs(jobs)}: left to the worker that acquired the lease")

    def show_running(self, jobs: Sequence[Job]) -> AbstractContextManager[Callable | None]:
        """Return a context that shows the progress of runs and yields a callable for it."""
        last = self.num_processed + len(jobs)
        numbers = f"{last}" if len(jobs) == 1 else f"{self.num_processed + 1} to {last}"
        label = f"[{numbers}/{self.total}] {format_run_label(jobs[0].spec)}"
        label += " and more" if len(jobs) > 1 else ""
        return show_progress(label, quiet=not self._shows_progress, transient=True)

    def report_finished(
        self,
        jobs: Sequence[Job],
        results: Sequence[Result],
        remaining: Sequence[Job] = (),
    ) -> None:
        """Report runs that this worker has executed, a line each.

        Args:
          jobs: the runs.
          results: their results.
          remaining: runs of their group that are still to be executed.
        """
        self.num_finished += len(jobs)
        num_ended = self.num_finished + self.num_elsewhere
        mean_seconds = (time.perf_counter() - self._start_time) / num_ended
        seconds_per_run = results[0].seconds  # runs in step have equal shares of the time
        num_others = self.total - self.num_processed - len(jobs)
        seconds_to_go = mean_seconds * num_others
        if not self.num_elsewhere:  # then the rest of the group is expected to take as long
            seconds_to_go += (seconds_per_run - mean_seconds) * len(remaining)
        for job, result in zip(jobs, results, strict=True):
            label = self._format_jobs([job])
            self.num_processed += 1
            outcome = f"{_format_outcome(result.summary)} in {format_duration(seconds_per_run)}"
            is_last = self.num_processed == self.total
            status = "done" if is_last else f"about {format_duration(seconds_to_go)} to go"
            if self.num_elsewhere:
                status += f"; {self.num_elsewhere} made by others"
            self.print_line(f"{label}: {outcome}; {status}")

    def report_elsewhere(self, count: int) -> None:
        """Count runs that other workers have executed."""
        self.num_elsewhere += count
        self.num_processed += count

    def report_waiting(self, count: int, owners: Sequence[str]) -> None:
        """Report that other workers have the leases of all remaining runs.

        Args:
          count: number of remaining runs.
          owners: the other workers.
        """
        runs = "1 run" if count == 1 else f"{count} runs"
        self.print_line(f"waiting for {runs} of other workers: {', '.join(owners)}")

    def _format_jobs(self, jobs: Sequence[Job]) -> str:
        label = f"[{self.num_processed + 1}/{self.total}] {format_run_label(jobs[0].spec)}"
        return label + (f" and {len(jobs) - 1} more" if len(jobs) > 1 else "")


def _format_outcome(summary: dict[str, Any]) -> str:
    accuracy = summary["final_accuracy"]
    if summary.get("diverged"):
        text = "diverged"
    elif summary.get("bmta") is not None:
        text = f"{100 * summary['bmta']:.2f} % of clients' own tests"
    elif accuracy is None or math.isnan(accuracy):
        text = "no accuracy"
    else:
        text = f"{100 * accuracy:.2f} %"
    return text + (f" after round {summary['rounds']}" if summary.get("stopped_early") else "")
