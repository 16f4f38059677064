"""Runs of a sweep that go in step: made, and each written when it has ended."""

import contextlib
import math
from collections.abc import Sequence

from fedjax_het.common.errors import ConfigError
from fedjax_het.running.advance import advanced, start
from fedjax_het.running.checkpoints import UNFINISHED, Checkpoints, forget
from fedjax_het.running.continuing import state_path
from fedjax_het.running.ledger import Job
from fedjax_het.running.outcome import result_of, results_of
from fedjax_het.running.prepare import Group
from fedjax_het.running.progress import Progress
from fedjax_het.running.rescue import Keeper
from fedjax_het.running.result import Result
from fedjax_het.running.runs import Runs, gathered
from fedjax_het.running.sharing_out import ClaimLost, Sharing
from fedjax_het.running.watching import Callback, Watch

PAUSES = 8  # of a run, at which others may take the places of those that have ended
FREE = 0.25  # of the places, at least, that others then find


class Together:
    """A set of runs of a group, no more than go together.

    A run that ends before the others, since it diverged or was ended early, is written at once.
    Where a quarter of the places have become free, the others stop at the next of eight points of
    their rounds if runs of their kind are waiting: they go on from their checkpoints with those
    that stop at the same point, in full sets. Without a folder there are no checkpoints, and no
    such stops.
    """

    def __init__(
        self,
        group: Group,
        jobs: list[Job],
        places: list[int],
        keeper: Keeper,
        share: Sharing,
        callbacks: Sequence[Callback] = (),
    ):
        """jobs: of all federations of the group. places: among them, of those to be made, which
        this worker has claimed. What another has taken over since is left to it."""
        self.group, self.jobs, self.places = group, jobs, places
        self.keeper, self.share, self.callbacks = keeper, share, callbacks
        self.going = {i: jobs[place] for i, place in enumerate(places)}  # those without a result
        self.number = len(places)
        self.folders = None
        if keeper.folder is not None:
            self.folders = [keeper.folder / UNFINISHED / job.digest for job in self._jobs]
            for folder in self.folders:
                with contextlib.suppress(OSError):  # which the first checkpoint will say
                    folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(self.folders)

    def made(self, *, keep_state: bool) -> list[Job]:
        """Make them, as far as they go: -> the group's jobs, of which some may wait elsewhere."""
        try:
            with self.share.ledger.running(self._jobs) as show:

                def progress(progress: Progress) -> None:
                    if show is not None:
                        show(progress)
                    self.share.require(self._jobs)  # as late as can be before a checkpoint

                self._advance(progress, keep_state)
        except (ClaimLost, ConfigError, OSError):
            if self.share.holds(self._jobs):
                raise
            self.share.ledger.lost(self._jobs)
            self.share.drop(self._jobs)
            return self.jobs
        return self._parked() if self.going else self.jobs

    @property
    def _jobs(self) -> list[Job]:
        return list(self.going.values())

    def _advance(self, progress, keep_state: bool) -> None:
        federations = [self.group.federations[place] for place in self.places]
        records = [job.record for job in self._jobs if job.record is not None]
        runs = gathered(self.group, federations, progress=progress, records=records)
        runs.pause = self._pause(runs)
        watch = Watch(runs, self.checkpoints, self.callbacks)
        start(runs, self.checkpoints, records or None)
        watch.begin()
        for phase in advanced(runs, self.checkpoints):
            watch.after(phase)
            ended = [i for i in self.going if i not in runs.going]
            if ended and runs.going and runs.done < runs.rounds:
                self._give(runs, watch, {i: result_of(runs, i) for i in ended}, keep_state)
            if self._is_to_wait(runs):
                self.checkpoints.save(runs, now=True)
                if not self.checkpoints.refused:
                    return
        results = dict(enumerate(results_of(runs)))
        self._give(runs, watch, {i: results[i] for i in self.going}, keep_state)

    def _give(self, runs: Runs, watch: Watch, results: dict[int, Result], keep_state: bool) -> None:
        """Write these, whose runs have ended."""
        jobs = [self.going[i] for i in results]
        if not self.share.holds(jobs):
            raise ClaimLost
        for i, result in results.items():
            job = self.going.pop(i)
            if keep_state and self.keeper.folder is not None:
                self.checkpoints.keep(runs, i, state_path(self.keeper.folder, job.digest))
            if self.keeper.keep(result) and self.folders is not None:
                forget(self.folders[i])
            runs.given.add(i)
            self.share.made(job, result)
            watch.end(i, result)
            result.state = result.models = None  # a sweep's states together may not fit
        left = [job for job in self.jobs if job.digest in self.share.left and job not in self._jobs]
        self.share.ledger.made(jobs, list(results.values()), left, self.number)

    def _pause(self, runs: Runs) -> int | None:
        """Rounds between points at which the set may stop, where some may end before others."""
        early = any(each.spec.ends_by_rules for each in self.group.federations)
        return math.ceil(runs.rounds / PAUSES) if early and self.folders is not None else None

    def _is_to_wait(self, runs: Runs) -> bool:
        """Whether those that are left make room for fuller sets."""
        if runs.pause is None or runs.done % runs.pause or runs.done == runs.rounds:
            return False
        free = runs.plan.capacity - len(self.going)
        if runs.within is not None or not self.going or free < FREE * runs.plan.capacity:
            return False
        others = [job for job in self.jobs if job.digest in self.share.left]
        return len(others) > len(self.going)

    def _parked(self) -> list[Job]:
        """The jobs of the group, those that wait as their checkpoints have them."""
        waiting = {job.digest: job for job in self.share.parked(self._jobs)}
        return [waiting.get(job.digest, job) for job in self.jobs]
