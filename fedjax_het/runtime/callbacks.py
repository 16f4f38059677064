"""Callbacks: functions of the user that are called between calls of the runs' programs.

    def show(status: RunStatus) -> None:
        print(status.done, status.metrics["test_accuracy"][status.done - 1])

    simulate(spec, callbacks=[show])

Each callback is called on the host for every run in turn. The calls are at the start of the run,
after every chunk of rounds, and after every part of the server's work between rounds. The last call
is at the end, when the result is written. A callback that stores something for several runs stores
it by `RunStatus.digest`. If a callback raises, the runs' checkpoints are written, and a note on the
error names the callback. If a signal such as Ctrl-C interrupts the callbacks and the run continues,
they are called again with the same rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_het.algorithms.base import InitialTraffic, Traffic
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.runtime.checkpointing import CheckpointWriter
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.history import CALLBACK, EarlyStop, build_traffic_curves
from fedjax_het.runtime.result_builder import build_model_getter, compute_result_digest
from fedjax_het.runtime.result_display import name_data
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.schedules import compute_traffic
from fedjax_het.runtime.trained_model import TrainedModel
from fedjax_het.utils.config import validate
from fedjax_het.utils.text import to_one_line


@dataclass(frozen=True, eq=False, repr=False)
class RunStatus:
    """The progress of a run, and all its metrics so far.

    Attributes:
      spec: the settings of the run.
      digest: the name of the files of its result.
      phase: "start", "rounds", the name of the server's work between rounds, or "end".
      done: number of rounds that are done.
      total: number of rounds of the run.
      metrics: curves of the rounds that are done, `[done]` and more, as of a `Result`; read-only.
        NaN where nothing was measured: `test_accuracy` in rounds without an evaluation,
        `train_loss` in rounds in which no client trained. A comparison with NaN is false.
      new_metrics: curves of the rounds since the last call.
      wall_seconds: wall-clock time so far; runs in lockstep share it.
      bytes_up: bytes from clients to the server so far.
      bytes_down: bytes from the server to clients so far.
      result: the result, at the end of the run; None before.

    Example:
      >>> from fedjax_het import RunSpec, simulate
      >>> phases = []
      >>> spec = RunSpec(dataset="digits", model="mlp", num_clients=2, rounds=1)
      >>> result = simulate(spec, callbacks=[lambda status: phases.append(status.phase)])
      >>> phases
      ['start', 'rounds', 'end']
    """

    spec: ResolvedRunSpec
    digest: str
    phase: str
    done: int
    total: int
    metrics: dict[str, np.ndarray]
    new_metrics: dict[str, np.ndarray]
    wall_seconds: float
    bytes_up: float
    bytes_down: float
    result: Result | None
    _data_names: dict[str, str | None]
    _get_model: Callable[[int | None], TrainedModel]
    _request_stop: Callable[[str], None]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by name; own data and partitions are named by digest: "own 2c919055"."""
        return {**self.spec.to_dict(), **self._data_names}

    def model(self, client: int | None = None) -> TrainedModel:
        """Return the current model, which the call copies from the devices; see `Result.model`.

        Args:
          client: id of a client, if clients have their own models (default: the global model).

        Returns:
          The trained model.
        """
        return self._get_model(client)

    def stop(self, reason: str) -> None:
        """End the run after the rounds that are done; the summary's `stopped_early` has the reason.

        After the last round the call has no effect.

        Args:
          reason: text for the summary.
        """
        self._request_stop(to_one_line(validate("reason", reason, str)))

    def __repr__(self) -> str:
        dataset = self._data_names["dataset"]
        description = f"{self.spec.algorithm} on {dataset}, seed {self.spec.seed}"
        return f"RunStatus({description}: {self.phase}, {self.done} of {self.total} rounds)"


Callback = Callable[[RunStatus], Any]


class CallbackRunner:
    """Calls the callbacks of runs in lockstep.

    Attributes:
      always_report: whether a `RunStatus` is built where there are no callbacks, too.
    """

    def __init__(
        self, group_state: GroupState, checkpoints: CheckpointWriter, callbacks: Sequence[Callback]
    ):
        self._group_state, self._checkpoints, self._callbacks = group_state, checkpoints, callbacks
        self.always_report = False
        self._rounds_reported: dict[int, int] = {}
        self._digests: dict[int, str] = {}
        self._traffic: dict[int, tuple[Traffic, InitialTraffic]] = {}

    def call_unfinished(self, phase: str) -> None:
        """Call the callbacks for every run that has no result yet, see `call`."""
        for i in range(len(self._group_state.prepared_runs)):
            if i not in self._group_state.reported:
                self.call(i, phase)

    def call(self, i: int, phase: str, result: Result | None = None) -> RunStatus | None:
        """Call the callbacks for a run, and record that they were called, unless a signal came.

        Args:
          i: the run.
          phase: see `RunStatus`.
          result: its result, at the end.

        Returns:
          The status; None if no callback or loop reads it.
        """
        status = None
        if self._callbacks or self.always_report:
            status = self._build_status(i, phase, result)
            self._call_all(i, status)
            self._rounds_reported[i] = status.done
        self._group_state.update(unreported_phase=None)
        return status

    def _call_all(self, i: int, status: RunStatus) -> None:
        for callback in self._callbacks:
            try:
                callback(status)
            except Exception as error:  # which a signal is not
                self._rounds_reported[i] = status.done
                self._group_state.update(unreported_phase=None)
                self._checkpoints.save(self._group_state, force=True)
                name = getattr(callback, "__qualname__", type(callback).__qualname__)
                has_folder = self._checkpoints.folders is not None
                kept = "a checkpoint is written" if has_folder else "there is no checkpoint"
                note = f"raised by the callback {name} after round {status.done} ({kept})"
                error.add_note(to_one_line(note))
                raise

    def _build_status(self, i: int, phase: str, result: Result | None) -> RunStatus:
        group_state, run = self._group_state, self._group_state.prepared_runs[i]
        if i not in self._traffic:  # the last to be stored: a signal may come between
            self._digests[i] = compute_result_digest(group_state, i)
            program = group_state.group.program
            traffic_per_client = compute_traffic(
                program.algorithm, program.signature.training, run.hp
            )
            initial_traffic = program.algorithm.initial_traffic(run.federation_data)
            self._traffic[i] = (traffic_per_client, initial_traffic)
        done, before = group_state.count_rounds_completed(i), self._rounds_reported.get(i, 0)
        work_counts = run.scheduler.work_counts
        traffic = build_traffic_curves(work_counts, *self._traffic[i], group_state.total_rounds)
        curves = {**group_state.curves[i], **traffic}
        metrics = {name: curve[:done].view() for name, curve in curves.items()}
        for curve in metrics.values():
            curve.flags.writeable = False
        return RunStatus(
            spec=run.spec,
            digest=self._digests[i],
            phase=phase,
            done=done,
            total=group_state.total_rounds,
            metrics=metrics,
            new_metrics={name: curve[before:] for name, curve in metrics.items()},
            wall_seconds=group_state.timing.compute_wall_seconds(len(group_state.prepared_runs)),
            bytes_up=float(traffic["bytes_up"][:done].sum()),
            bytes_down=float(traffic["bytes_down"][:done].sum()),
            result=result,
            _data_names=name_data(run.spec, run.user_digests),
            _get_model=lambda client: self._get_model(i, result, client),
            _request_stop=lambda reason: self._stop_run(i, reason),
        )

    def _get_model(self, i: int, result: Result | None, client: int | None) -> TrainedModel:
        if result is not None:
            return result.model(client)
        group_state = self._group_state
        state = group_state.fetch_state(i)
        if group_state.pager is not None:
            state = state._replace(clients=group_state.pager.states[i])
        return build_model_getter(group_state, i, state)(client)

    def _stop_run(self, i: int, reason: str) -> None:
        group_state = self._group_state
        if i in group_state.active and group_state.is_unfinished:
            group_state.end_run(i, EarlyStop(group_state.rounds_done, CALLBACK, reason))
