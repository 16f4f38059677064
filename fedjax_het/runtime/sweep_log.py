"""The account of a sweep as it goes: what is made, how it ended, how long the rest may take."""

import functools
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.data import DATASETS
from fedjax_het.runtime.progress import format_duration, show_progress
from fedjax_het.runtime.results import Result
from fedjax_het.utils import console
from fedjax_het.utils.text import format_classes_per_client, to_one_line


class Job(NamedTuple):
    """One run to be made."""

    spec: ResolvedRunSpec
    digest: str  # of its files
    record: dict | None  # of the checkpoint that it continues from


def format_run_label(spec: RunSpec) -> str:
    """A run in a few words, for status lines: what it is, not every setting."""
    parts = [spec.algorithm, spec.dataset]
    if spec.model:
        parts.append(spec.model + (f" width {spec.width}" if spec.width else ""))
    if spec.alpha is not None:
        parts.append(f"alpha {spec.alpha:g}")
    if spec.classes is not None:
        parts.append(format_classes_per_client(spec.classes))
    parts += _list_nondefault_options(spec)
    default_spec = _resolve_defaults(spec, spec.options)
    parts += [
        f"{name} {value:g}" for name, value in spec.hp.items() if value != default_spec.hp.get(name)
    ]
    if spec.local_epochs not in (None, default_spec.local_epochs):
        parts.append(f"{spec.local_epochs} local epochs")
    if spec.lr_schedule is not None:
        parts.append(f"{spec.lr_schedule} rate")
    if spec.server_data is not None:
        options = ", ".join(f"{n}={value}" for n, value in (spec.server_options or {}).items())
        parts.append(f"server data {spec.server_data}({options})")
    if spec.held_out_clients is not None:
        parts.append(f"{spec.held_out_clients} clients held out")
    if spec.scored is not None:
        parts.append(f"{spec.scored} models scored")
    return to_one_line(", ".join([*parts, f"seed {spec.seed}"]))


def _resolve_defaults(spec: RunSpec, options: dict[str, Any]) -> ResolvedRunSpec:
    """As the method is on these data where nothing but these options is said."""
    # A data set that is not known here, of a result made elsewhere, has no settings of its own.
    dataset = spec.dataset if spec.dataset in DATASETS else "digits"
    key = (spec.algorithm, dataset, spec.model, spec.protocol, spec.local_optimizer)
    return _resolve_cached(key, json.dumps(options, sort_keys=True, default=str))


@functools.lru_cache
def _resolve_cached(key: tuple[Any, ...], options: str) -> ResolvedRunSpec:
    algorithm, dataset, model, protocol, optimizer = key
    spec = RunSpec(
        algorithm,
        dataset,
        model=model,
        protocol=protocol,
        local_optimizer=optimizer,
        options=json.loads(options),
    )
    return spec.resolved()


def _list_nondefault_options(spec: RunSpec) -> list[str]:
    """Those of the method that its preset does not have, the preset first."""
    field = METHODS[spec.algorithm].options.PRESET_FIELD
    preset = {field: spec.options[field]} if field in spec.options else {}
    default_options, preset_options = (
        _resolve_defaults(spec, {}).options,
        _resolve_defaults(spec, preset).options,
    )
    preset_texts = [
        f"{name} {value}" for name, value in preset.items() if value != default_options.get(name)
    ]
    nondefault = {
        name: value for name, value in spec.options.items() if value != preset_options.get(name)
    }
    return preset_texts + [f"{name} {value}" for name, value in nondefault.items()]


def build_status_printer(progress: Callable[[str], None] | None) -> Callable[[str], None]:
    """What gets the lines of a sweep: the function, or in place of `print` what says them in this
    process's manner, see `utils.console`; nothing for None."""
    if progress is None:
        return lambda line: None
    return console.print_status if progress is print else progress


class SweepProgress:
    """Says what is made, how it ended and how long the rest may take.

    progress: as `sweep` takes it.
    """

    def __init__(self, total: int, progress: Callable[[str], None] | None):
        self.total, self.print_line = total, build_status_printer(progress)
        self._shows_progress = progress is print
        self.num_processed = 0  # runs dealt with
        self.num_finished = self.num_elsewhere = 0  # made by this worker, by others
        self.started_at = self.group_started_at = time.perf_counter()

    def report_rejected(self, jobs: list[Job], reason: str, *, show_reason: bool = True) -> None:
        """These cannot be run; the reason is shown unless it was."""
        if show_reason:
            others_text = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
            label = self._format_label(self.num_processed + 1, jobs[0])
            self.print_line(f"{label}{others_text}: not run: {reason}")
        self.num_processed += len(jobs)

    def show_running(self, jobs: list[Job]) -> AbstractContextManager[Callable | None]:
        """Shows how far these are."""
        first, last = self.num_processed + 1, self.num_processed + len(jobs)
        range_text = "" if first == last else f" to {last}"
        label = f"[{first}{range_text}/{self.total}] {format_run_label(jobs[0].spec)}"
        self.group_started_at = time.perf_counter()
        label += " and more" if range_text else ""
        return show_progress(label, quiet=not self._shows_progress, transient=True)

    def report_finished(
        self, jobs: list[Job], results: list[Result], remaining: list[Job], num_parallel: int = 0
    ) -> None:
        """These were made, beside others so many `together` (default: they alone); `left` are those
        of their group that are still to be made."""
        seconds_per_run = (time.perf_counter() - self.group_started_at) / (
            num_parallel or len(jobs)
        )
        self.num_finished += len(jobs)
        mean_seconds = (time.perf_counter() - self.started_at) / (
            self.num_finished + self.num_elsewhere
        )
        num_remaining = self.total - self.num_processed - len(jobs)
        seconds_remaining = mean_seconds * num_remaining
        if not self.num_elsewhere:
            # The rest of the group as these; of other groups only the mean so far is known.
            seconds_remaining = seconds_per_run * len(remaining) + mean_seconds * (
                num_remaining - len(remaining)
            )
        for job, result in zip(jobs, results, strict=True):
            self.num_processed += 1
            outcome = _format_outcome(result.summary)
            remaining_text = (
                f"about {format_duration(seconds_remaining)} to go"
                if self.num_processed < self.total
                else "done"
            )
            if self.num_elsewhere:
                remaining_text += f"; {self.num_elsewhere} made by others"
            self.print_line(
                f"{self._format_label(self.num_processed, job)}: {outcome} in {format_duration(seconds_per_run)}; {remaining_text}"
            )

    def report_returned(self, job: Job, result: Result) -> None:
        """One of many at a time, elsewhere and for this process, came back."""
        self.num_processed += 1
        self.num_finished += 1
        mean_seconds = (time.perf_counter() - self.started_at) / self.num_finished
        seconds_remaining = mean_seconds * (self.total - self.num_processed)
        remaining_text = (
            f"about {format_duration(seconds_remaining)} to go"
            if self.num_processed < self.total
            else "done"
        )
        duration = format_duration(result.summary["wall_seconds"])
        outcome = _format_outcome(result.summary)
        self.print_line(
            f"{self._format_label(self.num_processed, job)}: {outcome} in {duration}; {remaining_text}"
        )

    def report_elsewhere(self, count: int) -> None:
        """So many more were found made by other workers."""
        self.num_elsewhere += count
        self.num_processed += count

    def report_waiting(self, count: int, owners: list[str]) -> None:
        """Nothing is left but what others are at."""
        runs = "1 run" if count == 1 else f"{count} runs"
        self.print_line(f"waiting for {runs} of other workers: {', '.join(owners)}")

    def report_lost(self, jobs: list[Job]) -> None:
        """These are given up, as they are another's."""
        others_text = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        label = self._format_label(self.num_processed + 1, jobs[0])
        self.print_line(f"{label}{others_text}: left to the worker who took over from this one")

    def _format_label(self, number: int, job: Job) -> str:
        return f"[{number}/{self.total}] {format_run_label(job.spec)}"


def _format_outcome(summary: dict) -> str:
    early_stop_text = f" after round {summary['rounds']}" if summary.get("stopped_early") else ""
    return _format_accuracy(summary) + early_stop_text


def _format_accuracy(summary: dict) -> str:
    if summary.get("diverged"):
        return "diverged"
    if summary.get("bmta") is not None:
        return f"{100 * summary['bmta']:.2f} % of clients' own tests"
    accuracy = summary["final_accuracy"]
    return "no accuracy" if accuracy is None or np.isnan(accuracy) else f"{100 * accuracy:.2f} %"
