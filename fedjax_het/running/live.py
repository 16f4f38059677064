"""One federation as a loop over its rounds, which whoever goes through it may look at and leave."""

from collections.abc import Callable, Iterator, Sequence

from fedjax_het.common.doors import validate_type
from fedjax_het.common.errors import require
from fedjax_het.common.records import PositiveInt
from fedjax_het.running.advance import advance_runs, log_run_header, start_runs
from fedjax_het.running.checkpoints import CheckpointWriter
from fedjax_het.running.needs import translate_out_of_memory
from fedjax_het.running.outcome import build_result
from fedjax_het.running.result import Result
from fedjax_het.running.runs import GroupState
from fedjax_het.running.stopping import CALLBACK, EarlyStop
from fedjax_het.running.watching import Callback, CallbackRunner, RunStatus


class Session:
    """A federation that is ready, or at some round; see `federation`."""

    def __init__(
        self,
        group_state: GroupState,
        checkpoints: CheckpointWriter,
        record: dict | None,
        callbacks: Sequence[Callback],
        write_result: Callable[[Result], None],
    ):
        """record: of the checkpoint to go on from. keep: writes the result."""
        self._group_state, self._checkpoints, self._record = group_state, checkpoints, record
        self._callback_runner = CallbackRunner(group_state, checkpoints, callbacks)
        self._write_result = write_result
        self._started = False
        self._result: Result | None = None

    def rounds(self, every: PositiveInt | None = None) -> Iterator[RunStatus]:
        """Go through the rounds that are left: where the run stands, after every chunk of them.

        every: chunks end at multiples of so many rounds (default: they take about two seconds).
        When there are none left the result is written. Who leaves the loop before leaves a
        checkpoint, where there is an `output_dir`, and goes on with another loop, or takes
        `result()`. Cost: the programs are compiled at the first round.
        """
        return self._rounds(validate_type("every", every, PositiveInt | None))

    def _rounds(self, every: int | None) -> Iterator[RunStatus]:
        self._callback_runner.always_report, self._group_state.pause_every = True, every
        try:
            for status in self.advance():
                assert status is not None
                yield status
        except GeneratorExit:
            self._checkpoints.save(self._group_state, force=True)
            raise

    def advance(self) -> Iterator[RunStatus | None]:
        """The same; of nothing where nobody looks."""
        with translate_out_of_memory(self._group_state.prepared_runs[0].spec):
            if not self._started:
                log_run_header(self._group_state)
                start_runs(
                    self._group_state, self._checkpoints, [self._record] if self._record else None
                )
                self._started = True
                self._callback_runner.on_start()
            if self._result is None:
                for phase in advance_runs(self._group_state, self._checkpoints):
                    statuses = self._callback_runner.on_phase_end(phase)
                    yield statuses[0] if statuses else None
            self._finalize()

    def result(self) -> Result:
        """The result; of a run that was left before its last round, which ends it, that of the
        rounds so far. Raises ConfigError before the first round."""
        expected = "a run that was begun, by going through rounds()"
        require(self._started, "result", "none yet", expected)
        group_state = self._group_state
        if (
            self._result is None
            and group_state.active
            and group_state.rounds_done < group_state.total_rounds
        ):
            group_state.early_stops[0] = EarlyStop(
                group_state.rounds_done, CALLBACK, "left by whoever went through its rounds"
            )
        self._finalize()
        assert self._result is not None
        return self._result

    def _finalize(self) -> None:
        if self._result is None:
            self._result = build_result(self._group_state, 0)
            self._write_result(self._result)
            self._group_state.reported.add(0)
            self._callback_runner.on_run_end(0, self._result)
