"""Simulation of asynchronous aggregation: clients start and arrive at times of their own."""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_het.core.schedule import MeasureLosses, RoundPlan, RoundPlans
from fedjax_het.core.work_items import Workload
from fedjax_het.systems.base import Federation, SystemModel
from fedjax_het.systems.devices import DeviceModel, Speed
from fedjax_het.systems.participation import Deadline, OverSelection
from fedjax_het.systems.selection import AdaptiveSelection, PoissonSampling
from fedjax_het.systems.simulation import (
    SystemSimulation,
    find_available,
    find_next_time,
    select_clients,
)
from fedjax_het.utils.errors import ConfigError, display_name, require
from fedjax_het.utils.kinds import call_kind

_SYNCHRONOUS = (Deadline, OverSelection, AdaptiveSelection, PoissonSampling)  # kinds of rounds
_MAX_DROPOUT = 0.999  # the simulation draws 1 / (1 - probability) starts per update


class _Arrival(NamedTuple):
    """An update on its way to the server; arrivals sort by time, then by order of start."""

    time: float
    number: int
    client: int
    version: int
    num_steps: int
    fails: bool


class AsynchronousSimulation(SystemSimulation):
    """The simulation of clients that train without waiting for each other.

    S clients train at any time. The server changes its model when its buffer is full; a round is
    one change. Updates that arrive at one time are received in the order in which their clients
    started. Then free clients start from the present model. Clients without examples never start.

    Args:
      models: the kinds of system heterogeneity of the run. Without devices a minibatch takes one
        second at every client.
      federation: the clients; `cohort_size` is the number of clients that train at a time.
      buffer_size: updates of a change of the model; None: half of the clients that train at a time.
      max_staleness: largest staleness of an update that the server uses.
      can_train_partly: whether clients may end local training at any minibatch.

    Raises:
      ConfigError: for kinds that cannot be combined, and kinds of synchronous rounds.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.core.work_items import Workload
      >>> from fedjax_het.systems import AsynchronousSimulation, Federation
      >>> federation = Federation(np.array([4, 8]), cohort_size=2, seed=0, partition_seed=0)
      >>> simulation = AsynchronousSimulation([], federation, buffer_size=1, max_staleness=5)
      >>> steps = np.array([1, 4])
      >>> workload = Workload(steps, steps, np.zeros(2, int), np.zeros(2, int))
      >>> plans = list(simulation.simulate_rounds(lambda r: workload, 5))
      >>> [int(plan.clients[0]) for plan in plans], [int(plan.staleness[0]) for plan in plans]
      ([0, 0, 0, 0, 1], [0, 0, 0, 0, 4])
    """

    def __init__(
        self,
        models: Sequence[SystemModel],
        federation: Federation,
        *,
        buffer_size: int | None,
        max_staleness: int,
        can_train_partly: bool = True,
    ):
        if not any(isinstance(model, DeviceModel) for model in models):
            models = [*models, Speed(sigma=0.0, step_seconds=1.0)]
        super().__init__(models, federation, can_train_partly=can_train_partly)
        for model in models:
            if isinstance(model, _SYNCHRONOUS):
                raise ConfigError(
                    f"{display_name('system')} {model.name}: expected a method with synchronous rounds"
                )
        probability = 0.0 if self._dropout is None else self._dropout.probability
        is_valid = probability <= _MAX_DROPOUT
        expected = f"at most {_MAX_DROPOUT}: the server waits for updates"
        require(is_valid, "system dropout:probability", probability, expected)
        buffer_size = buffer_size or max(1, federation.cohort_size // 2)
        expected = f"at most {federation.cohort_size}, the number of clients that train at a time"
        is_valid = buffer_size <= federation.cohort_size
        require(is_valid, "options buffer_size", buffer_size, expected)
        self._buffer_size, self._max_staleness = buffer_size, max_staleness

    def simulate_rounds(
        self,
        get_workload: Callable[[int], Workload],
        num_rounds: int,
        measure_losses: MeasureLosses | None = None,
    ) -> RoundPlans:
        """Yield the clients of each change of the model.

        Args:
          get_workload: `get_workload(round_index)`: the work of all clients that start in a round.
          num_rounds: number of changes of the model.
          measure_losses: not read, since no kind of asynchronous simulation has candidates.

        Yields:
          The plan of each round.
        """
        federation, availability = self._federation, self._availability
        self._state = None
        if availability is not None:
            self._state = call_kind("system", availability, availability.start, federation)
        self._is_available, self._state_round = np.ones(federation.num_clients, bool), -1
        is_free = np.ones(federation.num_clients, bool)
        arrivals: list[_Arrival] = []
        buffer: list[_Arrival] = []
        time = start_time = 0.0
        round_index = version = num_started = num_in_round = num_draws = 0
        while round_index < num_rounds:
            if not arrivals and availability is not None:
                time = find_next_time(availability, self._state, time)
            count = federation.cohort_size - len(arrivals)
            path = (round_index, num_draws) if num_draws else (round_index,)
            started = self._start_clients(get_workload(round_index), is_free, count, path, time)
            num_draws += 1
            for k, num_steps, seconds, fails in started:
                arrival = _Arrival(time + seconds, num_started, k, version, num_steps, fails)
                heapq.heappush(arrivals, arrival)
                is_free[k] = False
                num_started, num_in_round = num_started + 1, num_in_round + 1
            is_idle = not arrivals  # no client is available: the server uses the updates it has
            if arrivals:
                time = arrivals[0].time
            while round_index < num_rounds and (is_idle or (arrivals and arrivals[0].time == time)):
                if not is_idle:
                    arrival = heapq.heappop(arrivals)
                    if arrival.fails or version - arrival.version > self._max_staleness:
                        is_free[arrival.client] = True
                    else:
                        buffer.append(arrival)
                if len(buffer) == self._buffer_size or is_idle:
                    yield _make_plan(buffer, version, num_in_round, time - start_time)
                    is_free[[each.client for each in buffer]] = True
                    version += any(each.num_steps > 0 for each in buffer)
                    round_index, start_time, num_in_round, num_draws = round_index + 1, time, 0, 0
                    buffer, is_idle = [], False

    def _start_clients(
        self,
        workload: Workload,
        is_free: np.ndarray,
        count: int,
        path: tuple[int, ...],
        time: float,
    ) -> list[tuple[int, int, float, bool]]:
        """Select clients; return id, minibatches, seconds, and whether each fails."""
        round_index, federation, rates = path[0], self._federation, self._rates
        if self._availability is not None and (
            self._availability.needs_clock or round_index != self._state_round
        ):
            self._is_available, self._state = find_available(
                self._availability, self._state, federation, round_index, time
            )
            self._state_round = round_index
        # Clients without examples need no time and would fill every buffer.
        has_work = workload.num_steps > 0
        candidates = np.flatnonzero(is_free & self._is_available & has_work)
        if not count or not len(candidates):
            return []
        selected = select_clients(self._selection, federation, candidates, count, *path)
        num_steps = self._draw_num_steps(workload, selected, round_index)
        seconds = self._count_transfer_seconds(workload)[selected]
        seconds = seconds + rates.step_seconds[selected] * num_steps
        fails = self._draw_failures(selected, *path)
        columns = (selected, num_steps, seconds, fails)
        return list(zip(*(values.tolist() for values in columns), strict=True))


def _make_plan(
    buffer: Sequence[_Arrival], version: int, num_selected: int, seconds: float
) -> RoundPlan:
    """Return the plan of the change of the model from `version` with the buffer's updates."""
    return RoundPlan(
        clients=np.array([arrival.client for arrival in buffer], np.int64),
        num_selected=num_selected,
        num_steps=np.array([arrival.num_steps for arrival in buffer], np.int64),
        seconds=seconds,
        staleness=np.array([version - arrival.version for arrival in buffer], np.int64),
    )
