"""One federation as a loop over its rounds, which whoever goes through it may look at and leave."""

from collections.abc import Callable, Iterator, Sequence

from fedjax_het.common.doors import of_kind
from fedjax_het.common.errors import require
from fedjax_het.common.records import Count
from fedjax_het.running.advance import advanced, announce, start
from fedjax_het.running.checkpoints import Checkpoints
from fedjax_het.running.needs import told_in_one_line
from fedjax_het.running.outcome import result_of
from fedjax_het.running.result import Result
from fedjax_het.running.runs import Runs
from fedjax_het.running.stopping import CALLBACK, Early
from fedjax_het.running.watching import Callback, Standing, Watch


class LiveRun:
    """A federation that is ready, or at some round; see `federation`."""

    def __init__(
        self,
        runs: Runs,
        checkpoints: Checkpoints,
        record: dict | None,
        callbacks: Sequence[Callback],
        keep: Callable[[Result], None],
    ):
        """record: of the checkpoint to go on from. keep: writes the result."""
        self._runs, self._checkpoints, self._record = runs, checkpoints, record
        self._watch = Watch(runs, checkpoints, callbacks)
        self._keep = keep
        self._begun = False
        self._result: Result | None = None

    def rounds(self, every: Count | None = None) -> Iterator[Standing]:
        """Go through the rounds that are left: where the run stands, after every chunk of them.

        every: chunks end at multiples of so many rounds (default: they take about two seconds).
        When there are none left the result is written. Who leaves the loop before leaves a
        checkpoint, where there is an `output_dir`, and goes on with another loop, or takes
        `result()`. Cost: the programs are compiled at the first round.
        """
        return self._rounds(of_kind("every", every, Count | None))

    def _rounds(self, every: int | None) -> Iterator[Standing]:
        self._watch.looks, self._runs.pause = True, every
        try:
            for standing in self.advance():
                assert standing is not None
                yield standing
        except GeneratorExit:
            self._checkpoints.save(self._runs, now=True)
            raise

    def advance(self) -> Iterator[Standing | None]:
        """The same; of nothing where nobody looks."""
        with told_in_one_line(self._runs.federations[0].spec):
            if not self._begun:
                announce(self._runs)
                start(self._runs, self._checkpoints, [self._record] if self._record else None)
                self._begun = True
                self._watch.begin()
            if self._result is None:
                for phase in advanced(self._runs, self._checkpoints):
                    told = self._watch.after(phase)
                    yield told[0] if told else None
            self._end()

    def result(self) -> Result:
        """The result; of a run that was left before its last round, which ends it, that of the
        rounds so far. Raises ConfigError before the first round."""
        expected = "a run that was begun, by going through rounds()"
        require(self._begun, "result", "none yet", expected)
        runs = self._runs
        if self._result is None and runs.going and runs.done < runs.rounds:
            runs.early[0] = Early(runs.done, CALLBACK, "left by whoever went through its rounds")
        self._end()
        assert self._result is not None
        return self._result

    def _end(self) -> None:
        if self._result is None:
            self._result = result_of(self._runs, 0)
            self._keep(self._result)
            self._runs.given.add(0)
            self._watch.end(0, self._result)
