"""Which of a sweep's runs this worker makes, where others may be at work on the same folder."""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedjax_het.common.errors import ConfigError
from fedjax_het.running.checkpoints import UNFINISHED, resumable
from fedjax_het.running.claims import Claims
from fedjax_het.running.ledger import Job, Ledger, teller
from fedjax_het.running.programs import static_key
from fedjax_het.running.result import Result
from fedjax_het.running.store import load_result
from fedjax_het.settings.spec import ResolvedSpec

POLL_SECONDS = 1.0  # between looks at what others do
CLAIMS = "claims"  # a folder beside the results


class ClaimLost(Exception):
    """Another worker has taken the run over: this one was silent for too long."""


class Sharing:
    """What is left of a sweep, and who makes it.

    known: results by name, of whoever made them. left: the runs that have none yet and could be
    made, in order.
    """

    def __init__(
        self,
        named: dict[str, ResolvedSpec],
        directory: Path | None,
        claims: Claims,
        progress: Callable[[str], None] | None,
        resume_anyway: bool = False,
        ended: Callable[[ResolvedSpec], Path | None] = lambda spec: None,
    ):
        """ended: the file of how a run with fewer rounds ended, if there is one."""
        self.directory, self.claims = directory, claims
        self._ended = functools.cache(lambda digest: ended(named[digest]))
        self._resume_anyway = resume_anyway
        self._unreadable: dict[str, int] = {}  # when results that cannot be read were written
        self.known: dict[str, Result] = {}
        self.left = dict(named)
        self._found()
        if self.known:
            line = f"{len(self.known)} of {len(named)} runs are in {directory} already"
            teller(progress)(line)
        self.ledger = Ledger(len(self.left), progress)
        self._checked = time.monotonic()

    def groups(self) -> Iterator[list[Job]]:
        """Runs that can be made together: of one signature, and at the same point if they resume.

        Groups at which nobody is come first: what costs is to compile. Of the first one run is
        claimed at once, so that workers that begin together begin with different groups.
        """
        chosen: set[str] = set()
        while True:
            self.look()
            taken = self.claims.others()
            free = [d for d in self.left if d not in chosen and d not in taken]
            busy = {static_key(self.left[d]) for d in taken if d in self.left}
            groups = self._grouped(free)
            if not groups:
                return
            if busy and chosen:  # others look for their next group, too: elsewhere
                groups.sort(key=lambda jobs: self._own_order(jobs[0].spec))
            jobs = min(groups, key=lambda jobs: static_key(jobs[0].spec) in busy)
            if chosen or any(self._take(job) for job in jobs):
                chosen |= {job.digest for job in jobs}
                yield jobs

    def claimed(self, jobs: Sequence[Job], count: int) -> list[int]:
        """Places among `jobs` of up to so many that this worker is to make now: of those that stand
        at one point, the least far first."""
        places: list[int] = []
        for i in sorted(range(len(jobs)), key=lambda i: (jobs[i].record or {}).get("round", 0)):
            job = jobs[i]
            apart = places and _point(job.record) != _point(jobs[places[0]].record)
            if len(places) == count:
                break
            if job.digest in self.left and not apart and self._take(job):
                places.append(i)
        return places

    def parked(self, jobs: Sequence[Job]) -> list[Job]:
        """The same runs where their checkpoints, just written, have them; they are nobody's now."""
        records = [self._record(job.digest, own=True) for job in jobs]
        self.drop(jobs)
        return [job._replace(record=record) for job, record in zip(jobs, records, strict=True)]

    def cannot(self, jobs: Sequence[Job]) -> None:
        """These cannot be run."""
        for job in jobs:
            self.left.pop(job.digest, None)
            self.claims.give_back(job.digest)

    def made(self, job: Job, result: Result) -> None:
        """This worker has, and what there is of it is on disk."""
        self.known[job.digest] = result
        self.left.pop(job.digest, None)
        self.claims.give_back(job.digest)

    def require(self, jobs: Sequence[Job]) -> None:
        """Raise ClaimLost unless all are still this worker's; looks at most twice a second."""
        now = time.monotonic()
        if now - self._checked >= 0.5:
            if not self.holds(jobs):
                raise ClaimLost
            self._checked = now

    def holds(self, jobs: Sequence[Job]) -> bool:
        return all(self.claims.holds(job.digest) for job in jobs)

    def drop(self, jobs: Sequence[Job]) -> None:
        """What another worker has taken over is its."""
        for job in jobs:
            self.claims.give_back(job.digest)

    def look(self) -> None:
        """Take in what others have made."""
        if count := self._found():
            self.ledger.made_elsewhere(count)

    def wait(self) -> bool:
        """Wait while others are at all that is left. Returns whether there is something to make;
        False: nothing is left."""
        told: set[str] = set()
        while True:
            taken = self.claims.others()
            self.look()
            if any(digest not in taken for digest in self.left):
                return True
            if not self.left:
                return False
            at_work = {taken[digest] for digest in self.left}
            if at_work - told:
                self.ledger.waiting(len(self.left), sorted(at_work))
                told |= at_work
            time.sleep(POLL_SECONDS)

    def _found(self) -> int:
        """How many more results are there now."""
        if self.directory is None:
            return 0
        # Listing the folder also lets a network file system see what is new.
        names = {path.name for path in self.directory.iterdir()}
        there = [digest for digest in self.left if f"{digest}.json" in names]
        return sum(self._load(digest) for digest in there)

    def _load(self, digest: str) -> bool:
        assert self.directory is not None
        try:
            written = (self.directory / f"{digest}.json").stat().st_mtime_ns
        except OSError:  # removed meanwhile
            return False
        if self._unreadable.get(digest) == written:  # which has been said
            return False
        result = load_result(self.directory, digest)
        if result is None:
            self._unreadable[digest] = written
            return False
        self.known[digest] = result
        del self.left[digest]
        return True

    def _take(self, job: Job) -> bool:
        """Claim a run if it is still to be made, and stands where it did when it was grouped."""
        if self.directory is None:
            return True
        if not self.claims.take(job.digest):
            return False
        self.look()  # its owner may have ended between the last look and now
        if job.digest in self.left:
            record = self._record(job.digest, own=True)
            if _point(record) == _point(job.record):
                return True
        self.claims.give_back(job.digest)
        return False

    def _record(self, digest: str, *, own: bool) -> dict | None:
        """Of the checkpoint that a run goes on from. own: this worker has claimed the run, and may
        set aside what is damaged."""
        if self.directory is None:
            return None
        folder, spec = self.directory / UNFINISHED / digest, self.left[digest]
        return resumable(
            folder,
            spec,
            ended=self._ended(digest),
            resume_anyway=self._resume_anyway,
            set_aside=own,
        )

    def _grouped(self, digests: Sequence[str]) -> list[list[Job]]:
        groups: dict[tuple, list[Job]] = {}
        for digest in digests:
            try:
                record = self._record(digest, own=False)
            except ConfigError:  # whoever makes the run sets it aside, or says why it stops
                record = None
            job = Job(self.left[digest], digest, record)
            groups.setdefault((static_key(job.spec), _point(record)), []).append(job)
        return list(groups.values())

    def _own_order(self, spec: ResolvedSpec) -> str:
        text = self.claims.owner.token + static_key(spec)
        return hashlib.sha256(text.encode()).hexdigest()


def _point(record: dict | None) -> tuple | None:
    """Where a run stands, and in which lanes."""
    if record is None:
        return None
    where = str(record["work"]), str(record.get("within"))
    return record["round"], *where, record["blocks"], record["lanes"]
