"""The account of a sweep as it goes: what is made, how it ended, how long the rest may take."""

import functools
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.common import manner
from fedjax_het.common.text import classes_text, one_line
from fedjax_het.data import DATASETS
from fedjax_het.running.progress import clock, progress_line
from fedjax_het.running.result import Result
from fedjax_het.settings.spec import ResolvedSpec, RunSpec


class Job(NamedTuple):
    """One run to be made."""

    spec: ResolvedSpec
    digest: str  # of its files
    record: dict | None  # of the checkpoint that it continues from


def describe(spec: RunSpec) -> str:
    """A run in a few words, for status lines: what it is, not every setting."""
    parts = [spec.algorithm, spec.dataset]
    if spec.model:
        parts.append(spec.model + (f" width {spec.width}" if spec.width else ""))
    if spec.alpha is not None:
        parts.append(f"alpha {spec.alpha:g}")
    if spec.classes is not None:
        parts.append(classes_text(spec.classes))
    parts += _unusual_options(spec)
    usual = _plain(spec, spec.options)
    parts += [f"{name} {value:g}" for name, value in spec.hp.items() if value != usual.hp.get(name)]
    if spec.local_epochs not in (None, usual.local_epochs):
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
    return one_line(", ".join([*parts, f"seed {spec.seed}"]))


def _plain(spec: RunSpec, options: dict[str, Any]) -> ResolvedSpec:
    """As the method is on these data where nothing but these options is said."""
    # A data set that is not known here, of a result made elsewhere, has no settings of its own.
    dataset = spec.dataset if spec.dataset in DATASETS else "digits"
    own = (spec.algorithm, dataset, spec.model, spec.protocol, spec.local_optimizer)
    return _resolved(own, json.dumps(options, sort_keys=True, default=str))


@functools.lru_cache
def _resolved(own: tuple[Any, ...], options: str) -> ResolvedSpec:
    algorithm, dataset, model, protocol, optimizer = own
    plain = RunSpec(
        algorithm,
        dataset,
        model=model,
        protocol=protocol,
        local_optimizer=optimizer,
        options=json.loads(options),
    )
    return plain.resolved()


def _unusual_options(spec: RunSpec) -> list[str]:
    """Those of the method that its preset does not have, the preset first."""
    field = METHODS[spec.algorithm].options.PRESET_FIELD
    preset = {field: spec.options[field]} if field in spec.options else {}
    default, usual = _plain(spec, {}).options, _plain(spec, preset).options
    said = [f"{name} {value}" for name, value in preset.items() if value != default.get(name)]
    odd = {name: value for name, value in spec.options.items() if value != usual.get(name)}
    return said + [f"{name} {value}" for name, value in odd.items()]


def teller(progress: Callable[[str], None] | None) -> Callable[[str], None]:
    """What gets the lines of a sweep: the function, or in place of `print` what says them in this
    process's manner, see `common.manner`; nothing for None."""
    if progress is None:
        return lambda line: None
    return manner.say if progress is print else progress


class Ledger:
    """Says what is made, how it ended and how long the rest may take.

    progress: as `sweep` takes it.
    """

    def __init__(self, total: int, progress: Callable[[str], None] | None):
        self.total, self.progress = total, teller(progress)
        self._shows = progress is print
        self.number = 0  # runs dealt with
        self.finished = self.elsewhere = 0  # made by this worker, by others
        self.began = self.running_since = time.perf_counter()

    def cannot(self, jobs: list[Job], reason: str, *, shown: bool = True) -> None:
        """These cannot be run; the reason is shown unless it was."""
        if shown:
            more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
            label = self._label(self.number + 1, jobs[0])
            self.progress(f"{label}{more}: not run: {reason}")
        self.number += len(jobs)

    def running(self, jobs: list[Job]) -> AbstractContextManager[Callable | None]:
        """Shows how far these are."""
        first, last = self.number + 1, self.number + len(jobs)
        more = "" if first == last else f" to {last}"
        label = f"[{first}{more}/{self.total}] {describe(jobs[0].spec)}"
        self.running_since = time.perf_counter()
        label += " and more" if more else ""
        return progress_line(label, quiet=not self._shows, passing=True)

    def made(
        self, jobs: list[Job], results: list[Result], left: list[Job], together: int = 0
    ) -> None:
        """These were made, beside others so many `together` (default: they alone); `left` are those
        of their group that are still to be made."""
        each = (time.perf_counter() - self.running_since) / (together or len(jobs))
        self.finished += len(jobs)
        mean = (time.perf_counter() - self.began) / (self.finished + self.elsewhere)
        others = self.total - self.number - len(jobs)
        to_go = mean * others
        if not self.elsewhere:
            # The rest of the group as these; of other groups only the mean so far is known.
            to_go = each * len(left) + mean * (others - len(left))
        for job, result in zip(jobs, results, strict=True):
            self.number += 1
            outcome = _outcome(result.summary)
            rest = f"about {clock(to_go)} to go" if self.number < self.total else "done"
            if self.elsewhere:
                rest += f"; {self.elsewhere} made by others"
            self.progress(f"{self._label(self.number, job)}: {outcome} in {clock(each)}; {rest}")

    def returned(self, job: Job, result: Result) -> None:
        """One of many at a time, elsewhere and for this process, came back."""
        self.number += 1
        self.finished += 1
        mean = (time.perf_counter() - self.began) / self.finished
        to_go = mean * (self.total - self.number)
        rest = f"about {clock(to_go)} to go" if self.number < self.total else "done"
        took = clock(result.summary["wall_seconds"])
        outcome = _outcome(result.summary)
        self.progress(f"{self._label(self.number, job)}: {outcome} in {took}; {rest}")

    def made_elsewhere(self, count: int) -> None:
        """So many more were found made by other workers."""
        self.elsewhere += count
        self.number += count

    def waiting(self, count: int, owners: list[str]) -> None:
        """Nothing is left but what others are at."""
        runs = "1 run" if count == 1 else f"{count} runs"
        self.progress(f"waiting for {runs} of other workers: {', '.join(owners)}")

    def lost(self, jobs: list[Job]) -> None:
        """These are given up, as they are another's."""
        more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        label = self._label(self.number + 1, jobs[0])
        self.progress(f"{label}{more}: left to the worker who took over from this one")

    def _label(self, number: int, job: Job) -> str:
        return f"[{number}/{self.total}] {describe(job.spec)}"


def _outcome(summary: dict) -> str:
    early = f" after round {summary['rounds']}" if summary.get("stopped_early") else ""
    return _accuracy(summary) + early


def _accuracy(summary: dict) -> str:
    if summary.get("diverged"):
        return "diverged"
    if summary.get("bmta") is not None:
        return f"{100 * summary['bmta']:.2f} % of clients' own tests"
    accuracy = summary["final_accuracy"]
    return "no accuracy" if accuracy is None or np.isnan(accuracy) else f"{100 * accuracy:.2f} %"
