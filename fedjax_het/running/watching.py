"""Callbacks: who looks at runs between calls of their programs, with all that is measured so far.

    def show(now: Standing) -> None:
        print(now.done, now.metrics["test_accuracy"][now.done - 1])

    simulate(spec, callbacks=[show])

Each is called for every run in turn, on the host: at its start, after every chunk of rounds and
every part of work between rounds, and at its end, when its result is written. One that keeps
something of several runs keeps it by `Standing.name`. One that raises ends what it looks at: the
runs' checkpoints are written, and a note on the error names it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedjax_het.common.doors import of_kind
from fedjax_het.common.text import one_line
from fedjax_het.running.accounts import traffic_curves
from fedjax_het.running.checkpoints import Checkpoints
from fedjax_het.running.federations import holdings_of
from fedjax_het.running.outcome import digest_of, models_of
from fedjax_het.running.result import Result
from fedjax_het.running.runs import Runs
from fedjax_het.running.stopping import CALLBACK, Early
from fedjax_het.running.trained import TrainedModel
from fedjax_het.settings.spec import ResolvedSpec

START, END = "start", "end"


@dataclass(frozen=True, eq=False, repr=False)
class Standing:
    """Where a run stands, and all it has measured."""

    spec: ResolvedSpec
    name: str
    """That of its result's files."""
    phase: str
    """start, rounds, the name of work between rounds, or end."""
    done: int
    """Rounds, of `total`."""
    total: int
    metrics: dict[str, np.ndarray]
    """Curves of the rounds that are done, `[done]` and more, as of a `Result`; not to be written
    to."""
    new: dict[str, np.ndarray]
    """The same of the rounds since the last call."""
    seconds: float
    """Wall-clock so far; runs made together share it."""
    bytes_up: float
    """From clients to the server, so far."""
    bytes_down: float
    result: Result | None = None
    """At its end."""
    _model: Callable[[int | None], TrainedModel] = field(default=None)  # type: ignore[assignment]
    _stop: Callable[[str], None] = field(default=None)  # type: ignore[assignment]

    def model(self, client: int | None = None) -> TrainedModel:
        """The global model as it is now, or a client's, fetched from the devices as it is asked
        for; see `Result.model`."""
        return self._model(client)

    def stop(self, reason: str) -> None:
        """End the run here: its result is of the rounds so far, and its summary's `stopped_early`
        says why. Nothing, after its last round."""
        self._stop(one_line(of_kind("reason", reason, str)))

    def __repr__(self) -> str:
        run = f"{self.spec.algorithm} on {self.spec.dataset}, seed {self.spec.seed}"
        return f"Standing({run}: {self.phase}, {self.done} of {self.total} rounds)"


Callback = Callable[[Standing], Any]


class Watch:
    """Tells callbacks where runs that go in step stand.

    looks: whether somebody else looks, too, and wants a `Standing` where there are no callbacks.
    """

    def __init__(
        self,
        runs: Runs,
        checkpoints: Checkpoints,
        callbacks: Sequence[Callback],
        *,
        looks: bool = False,
    ):
        self._runs, self._checkpoints, self._callbacks = runs, checkpoints, callbacks
        self.looks = looks
        self._told: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._moved: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def begin(self) -> None:
        """Before the first call of this process."""
        self._tell(range(len(self._runs.federations)), START)

    def after(self, phase: str) -> list[Standing]:
        """After a call, of every run that has no result yet."""
        every = range(len(self._runs.federations))
        return self._tell([i for i in every if i not in self._runs.given], phase)

    def end(self, i: int, result: Result) -> None:
        """When a run's result is written."""
        self._tell([i], END, result)

    def _tell(self, which: Iterable[int], phase: str, result: Result | None = None) -> list:
        if not (self._callbacks or self.looks):
            return []
        standings = []
        for i in which:
            standing = self._standing(i, phase, result)
            standings.append(standing)
            for callback in self._callbacks:
                try:
                    callback(standing)
                except Exception as error:
                    self._checkpoints.save(self._runs, now=True)
                    error.add_note(self._note(callback, standing))
                    raise
        return standings

    def _note(self, callback: Callback, standing: Standing) -> str:
        name = getattr(callback, "__qualname__", type(callback).__qualname__)
        kept = "no checkpoint is kept" if self._checkpoints.folders is None else "resume goes on"
        return one_line(f"raised by the callback {name} after round {standing.done} ({kept})")

    def _standing(self, i: int, phase: str, result: Result | None) -> Standing:
        runs, federation = self._runs, self._runs.federations[i]
        if i not in self._names:
            self._names[i], self._moved[i] = digest_of(runs, i), self._bytes(i)
        done, before = runs.rounds_of(i), self._told.get(i, 0)
        up, down = self._moved[i]
        metrics = {name: _read_only(curve[:done]) for name, curve in runs.curves[i].items()}
        self._told[i] = done
        return Standing(
            federation.spec,
            self._names[i],
            phase,
            done,
            runs.rounds,
            metrics,
            {name: curve[before:] for name, curve in metrics.items()},
            runs.spent.wall(len(runs.federations)),
            float(up[:done].sum()),
            float(down[:done].sum()),
            result,
            lambda client: self._model(i, result, client),
            lambda reason: self._stop(i, reason),
        )

    def _bytes(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """`[rounds]` up and down, as the result counts them."""
        runs, federation = self._runs, self._runs.federations[i]
        algorithm, found = runs.algorithm, []
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:] if runs.source.apart else a.shape, a.dtype),
            runs.state,
        )

        def count(state: Any) -> None:
            found.append(algorithm.traffic(federation.hp, state))

        jax.eval_shape(count, shapes)
        once = algorithm.first_traffic(holdings_of(federation, runs.group.dataset, runs.group.pool))
        moved = traffic_curves(federation.scheduler.work, found[0], once, runs.rounds)
        return moved["bytes_up"], moved["bytes_down"]

    def _model(self, i: int, result: Result | None, client: int | None) -> TrainedModel:
        if result is not None:
            return result.model(client)
        runs = self._runs
        state = runs.host_states()[i]
        if runs.pager is not None:
            state = state._replace(clients=runs.pager.states[i])
        return models_of(runs, i, state)(client)

    def _stop(self, i: int, reason: str) -> None:
        runs = self._runs
        if i in runs.going and runs.done < runs.rounds:
            runs.early[i] = Early(runs.done, CALLBACK, reason)


def _read_only(curve: np.ndarray) -> np.ndarray:
    view = curve.view()
    view.flags.writeable = False
    return view
