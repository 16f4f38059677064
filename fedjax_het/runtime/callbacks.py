"""Callbacks: who looks at runs between calls of their programs, with all that is measured so far.

    def show(now: Standing) -> None:
        print(now.done, now.metrics["test_accuracy"][now.done - 1])

    simulate(spec, callbacks=[show])

Each is called for every run in turn, on the host: at its start, after every chunk of rounds and
every part of work between rounds, and at its end, when its result is written. One that keeps
something of several runs keeps it by `RunStatus.digest`. One that raises ends what it looks at: the
runs' checkpoints are written, and a note on the error names it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.runtime.checkpointing import CheckpointWriter
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.history import CALLBACK, EarlyStop, build_traffic_curves
from fedjax_het.runtime.result_builder import build_model_getter, compute_result_digest
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.trained_model import TrainedModel
from fedjax_het.utils.config import validate
from fedjax_het.utils.text import to_one_line

START, END = "start", "end"


@dataclass(frozen=True, eq=False, repr=False)
class RunStatus:
    """Where a run stands, and all it has measured."""

    spec: ResolvedRunSpec
    digest: str
    """That of its result's files."""
    phase: str
    """start, rounds, the name of work between rounds, or end."""
    done: int
    """Rounds, of `total`."""
    total: int
    metrics: dict[str, np.ndarray]
    """Curves of the rounds that are done, `[done]` and more, as of a `Result`; not to be written
    to."""
    new_metrics: dict[str, np.ndarray]
    """The same of the rounds since the last call."""
    wall_seconds: float
    """Wall-clock so far; runs made together share it."""
    bytes_up: float
    """From clients to the server, so far."""
    bytes_down: float
    result: Result | None = None
    """At its end."""
    _get_model: Callable[[int | None], TrainedModel] = field(default=None)  # type: ignore[assignment]
    _request_stop: Callable[[str], None] = field(default=None)  # type: ignore[assignment]

    def model(self, client: int | None = None) -> TrainedModel:
        """The global model as it is now, or a client's, fetched from the devices as it is asked
        for; see `Result.model`."""
        return self._get_model(client)

    def stop(self, reason: str) -> None:
        """End the run here: its result is of the rounds so far, and its summary's `stopped_early`
        says why. Nothing, after its last round."""
        self._request_stop(to_one_line(validate("reason", reason, str)))

    def __repr__(self) -> str:
        description = f"{self.spec.algorithm} on {self.spec.dataset}, seed {self.spec.seed}"
        return f"Standing({description}: {self.phase}, {self.done} of {self.total} rounds)"


Callback = Callable[[RunStatus], Any]


class CallbackRunner:
    """Calls the callbacks of runs that go in step.

    always_report: whether a `RunStatus` is built where there are no callbacks, too.
    """

    def __init__(
        self,
        group_state: GroupState,
        checkpoints: CheckpointWriter,
        callbacks: Sequence[Callback],
        *,
        always_report: bool = False,
    ):
        self._group_state, self._checkpoints, self._callbacks = group_state, checkpoints, callbacks
        self.always_report = always_report
        self._rounds_reported: dict[int, int] = {}
        self._digests: dict[int, str] = {}
        self._traffic: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def on_start(self) -> None:
        """Before the first call of this process."""
        self._call_callbacks(range(len(self._group_state.prepared_runs)), START)

    def on_phase_end(self, phase: str) -> list[RunStatus]:
        """After a call, of every run that has no result yet."""
        indices = range(len(self._group_state.prepared_runs))
        return self._call_callbacks(
            [i for i in indices if i not in self._group_state.reported], phase
        )

    def on_run_end(self, i: int, result: Result) -> None:
        """When a run's result is written."""
        self._call_callbacks([i], END, result)

    def _call_callbacks(
        self, indices: Iterable[int], phase: str, result: Result | None = None
    ) -> list:
        if not (self._callbacks or self.always_report):
            return []
        statuses = []
        for i in indices:
            status = self._build_status(i, phase, result)
            statuses.append(status)
            for callback in self._callbacks:
                try:
                    callback(status)
                except Exception as error:
                    self._checkpoints.save(self._group_state, force=True)
                    error.add_note(self._format_note(callback, status))
                    raise
        return statuses

    def _format_note(self, callback: Callback, status: RunStatus) -> str:
        name = getattr(callback, "__qualname__", type(callback).__qualname__)
        kept = "no checkpoint is kept" if self._checkpoints.folders is None else "resume goes on"
        return to_one_line(f"raised by the callback {name} after round {status.done} ({kept})")

    def _build_status(self, i: int, phase: str, result: Result | None) -> RunStatus:
        group_state, prepared_run = self._group_state, self._group_state.prepared_runs[i]
        if i not in self._digests:
            self._digests[i], self._traffic[i] = (
                compute_result_digest(group_state, i),
                self._compute_traffic(i),
            )
        done, before = group_state.count_rounds_completed(i), self._rounds_reported.get(i, 0)
        up, down = self._traffic[i]
        metrics = {name: _read_only(curve[:done]) for name, curve in group_state.curves[i].items()}
        self._rounds_reported[i] = done
        return RunStatus(
            prepared_run.spec,
            self._digests[i],
            phase,
            done,
            group_state.total_rounds,
            metrics,
            {name: curve[before:] for name, curve in metrics.items()},
            group_state.timing.compute_wall_seconds(len(group_state.prepared_runs)),
            float(up[:done].sum()),
            float(down[:done].sum()),
            result,
            lambda client: self._get_model(i, result, client),
            lambda reason: self._stop_run(i, reason),
        )

    def _compute_traffic(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """`[rounds]` up and down, as the result counts them."""
        group_state, prepared_run = self._group_state, self._group_state.prepared_runs[i]
        algorithm, traffic = group_state.group.program.algorithm, []
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                a.shape[1:] if group_state.group.runs_parallel else a.shape, a.dtype
            ),
            group_state.state,
        )

        def count(state: Any) -> None:
            traffic.append(algorithm.traffic(prepared_run.hp, state))

        jax.eval_shape(count, shapes)
        initial_traffic = algorithm.initial_traffic(prepared_run.federation_data)
        curves = build_traffic_curves(
            prepared_run.scheduler.work_counts,
            traffic[0],
            initial_traffic,
            group_state.total_rounds,
        )
        return curves["bytes_up"], curves["bytes_down"]

    def _get_model(self, i: int, result: Result | None, client: int | None) -> TrainedModel:
        if result is not None:
            return result.model(client)
        group_state = self._group_state
        state = group_state.fetch_states()[i]
        if group_state.pager is not None:
            state = state._replace(clients=group_state.pager.states[i])
        return build_model_getter(group_state, i, state)(client)

    def _stop_run(self, i: int, reason: str) -> None:
        group_state = self._group_state
        if i in group_state.active and group_state.is_unfinished:
            group_state.early_stops[i] = EarlyStop(group_state.rounds_done, CALLBACK, reason)


def _read_only(curve: np.ndarray) -> np.ndarray:
    view = curve.view()
    view.flags.writeable = False
    return view
