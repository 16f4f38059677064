"""Simulation of the clients' devices: who takes part in each round, and for how long.

The simulation runs on the host, before the first round. Its draws depend on the seeds, the round
and the client alone, so a resumed run repeats them. Only under client selection by losses a round
is simulated after the round before.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedjax_het.core.schedule import MeasureLosses, RoundPlan, RoundPlans
from fedjax_het.core.work_items import Workload, find_present
from fedjax_het.systems.availability import AvailabilityModel
from fedjax_het.systems.base import Federation, SystemModel
from fedjax_het.systems.devices import DeviceModel, DeviceRates
from fedjax_het.systems.participation import Deadline, Dropout, OverSelection, PartialWork
from fedjax_het.systems.selection import (
    AdaptiveSelection,
    ClientSelection,
    PoissonSampling,
    UniformSelection,
)
from fedjax_het.utils.errors import ConfigError, display_name
from fedjax_het.utils.kinds import call_kind

ModelT = TypeVar("ModelT", bound=SystemModel)


class _Times(NamedTuple):
    """Simulated seconds of selected clients, float64 `[n]` each."""

    step_seconds: np.ndarray
    transfer_seconds: np.ndarray


class SystemSimulation:
    """The simulation of a federation's devices.

    Args:
      models: the kinds of system heterogeneity of the run.
      federation: the clients.
      can_train_partly: whether clients may end local training at any minibatch. Otherwise partial
        work has whole epochs.

    Attributes:
      has_clock: whether rounds have a duration.
      is_adaptive: whether clients are selected by losses.
      loss_reports: examples on which candidates measure the loss of the current model, see
        `AdaptiveSelection.loss_reports`.
      shortens_work: whether clients may do a part of local training.

    Raises:
      ConfigError: for kinds that cannot be combined.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.core.work_items import Workload
      >>> from fedjax_het.systems import Federation, Speed, SystemSimulation
      >>> federation = Federation(np.array([4, 8]), cohort_size=2, seed=0, partition_seed=0)
      >>> simulation = SystemSimulation([Speed(sigma=0, step_seconds=2)], federation)
      >>> steps = np.array([1, 2])
      >>> workload = Workload(steps, steps, np.zeros(2, int), np.zeros(2, int))
      >>> [plan.seconds for plan in simulation.simulate_rounds(lambda r: workload, 3)]
      [4.0, 4.0, 4.0]
    """

    def __init__(
        self,
        models: Sequence[SystemModel],
        federation: Federation,
        *,
        can_train_partly: bool = True,
    ):
        self._federation, self._can_train_partly = federation, can_train_partly
        validate_combination(models)
        devices = [model for model in models if isinstance(model, DeviceModel)]
        self.has_clock = bool(devices)
        zeros = np.zeros(federation.num_clients)
        self._rates = DeviceRates(zeros, zeros, zeros)
        for device in devices:
            self._rates = _call(device, device.add_times, self._rates, federation)
            _check_rates(device, self._rates, federation.num_clients)
        self._availability = _get_single(models, AvailabilityModel)  # type: ignore[type-abstract]
        selection = _get_single(models, ClientSelection)  # type: ignore[type-abstract]
        self._selection = selection or UniformSelection()
        adaptive = _get_single(models, AdaptiveSelection)  # type: ignore[type-abstract]
        self._adaptive = adaptive  # replaces `_selection`
        self._dropout = _get_single(models, Dropout)
        self._partial_work = _get_single(models, PartialWork)
        self._over_selection = _get_single(models, OverSelection)
        self._deadline = _get_single(models, Deadline)
        self.is_adaptive = adaptive is not None
        self.loss_reports = None if adaptive is None else adaptive.loss_reports
        has_partial_deadline = self._deadline is not None and self._deadline.late == "partial"
        self.shortens_work = self._partial_work is not None or has_partial_deadline

    def simulate_rounds(
        self,
        get_workload: Callable[[int], Workload],
        num_rounds: int,
        measure_losses: MeasureLosses | None = None,
    ) -> RoundPlans:
        """Yield the plans of the rounds, and receive the losses of the clients, see `RoundPlans`.

        Args:
          get_workload: `get_workload(round_index)`: the work of all clients in a round.
          num_rounds: number of rounds.
          measure_losses: measures the losses of candidates (default: no candidate reports).

        Yields:
          The plan of each round.
        """
        federation, availability, time = self._federation, self._availability, 0.0
        state = (
            None if availability is None else _call(availability, availability.start, federation)
        )
        available = np.arange(federation.num_clients)
        adaptive = self._adaptive
        selection_state = None if adaptive is None else _call(adaptive, adaptive.start, federation)
        for r in range(num_rounds):
            start_time = time
            if availability is not None:
                time = find_next_time(availability, state, time)
                is_available, state = find_available(availability, state, federation, r, time)
                available = np.flatnonzero(is_available)
            workload = get_workload(r)
            present = available[find_present(federation.sizes, workload.sizes)[available]]
            candidates = None
            if adaptive is not None and self.loss_reports and measure_losses is not None:
                candidates = self._draw_candidates(adaptive, present, r)
                reports = measure_losses(r, candidates, self.loss_reports)
                selection_state = _call(adaptive, adaptive.record_losses, selection_state, reports)
            selected, selection_state = self._select(selection_state, workload, present, r)
            plan = self._simulate_round(workload, selected, r)
            if candidates is not None:
                num_receivers = len(np.union1d(candidates, selected))
                plan = plan._replace(num_selected=num_receivers)
            if plan.seconds is not None:
                time += plan.seconds
                plan = plan._replace(seconds=time - start_time)
            losses = yield plan
            if adaptive is not None and losses is not None:
                selection_state = _call(adaptive, adaptive.record_losses, selection_state, losses)

    def _select(
        self, state: Any, workload: Workload, available: np.ndarray, round_index: int
    ) -> tuple[np.ndarray, Any]:
        """Return the selected clients of a round, and the new state of the selection."""
        federation, rates, count = self._federation, self._rates, self._num_selected
        if not len(available):
            return available, state
        if self._adaptive is None:
            selected = select_clients(self._selection, federation, available, count, round_index)
            return selected, state
        durations = self._count_transfer_seconds(workload) + rates.step_seconds * workload.num_steps
        is_present = find_present(federation.sizes, workload.sizes)
        durations = np.where(is_present, durations, np.nan)
        arguments = (state, federation, available, count)
        options = {"durations": durations, "round_index": round_index}
        result = _call(self._adaptive, self._adaptive.select_by_losses, *arguments, **options)
        selected, state = _split_pair(self._adaptive, "select_by_losses", result)
        return check_selected(self._adaptive, selected, available, count), state

    def _draw_candidates(
        self, selection: AdaptiveSelection, available: np.ndarray, round_index: int
    ) -> np.ndarray:
        """Return the clients that report their loss of the current model."""
        federation = self._federation
        if not len(available):
            return available
        arguments = (federation, available, self._num_selected, round_index)
        candidates = _call(selection, selection.draw_candidates, *arguments)
        available = available[federation.sizes[available] > 0]
        return check_selected(selection, candidates, available, len(available))

    @property
    def _num_selected(self) -> int:
        """Number of clients to select."""
        if isinstance(self._selection, PoissonSampling):
            return self._federation.num_clients
        factor = 1.0 if self._over_selection is None else self._over_selection.factor
        return math.ceil(self._federation.cohort_size * factor - 1e-9)

    def _simulate_round(
        self, workload: Workload, selected: np.ndarray, round_index: int
    ) -> RoundPlan:
        """Return the plan of a round with the clients that the server selected."""
        federation, rates, deadline = self._federation, self._rates, self._deadline
        num_steps = self._draw_num_steps(workload, selected, round_index)
        times = _Times(
            rates.step_seconds[selected],
            self._count_transfer_seconds(workload)[selected],
        )
        is_ready = np.ones(len(selected), bool)
        limit = math.inf if deadline is None else deadline.seconds
        if deadline is not None and deadline.late == "partial":
            num_steps, is_ready = self._fit_deadline(workload, selected, num_steps, times)
        durations = times.transfer_seconds + times.step_seconds * num_steps
        is_ready &= durations <= limit
        # A client that fails is known to have failed at the time at which it would be ready. A
        # client without time for a minibatch is not ready at the deadline.
        end_times = np.where(is_ready, durations, limit)
        is_ready &= ~self._draw_failures(selected, round_index)
        ready = np.flatnonzero(is_ready)
        seconds = float(end_times.max(initial=0.0))
        if self._over_selection is not None and len(ready) >= federation.cohort_size:
            by_arrival = ready[np.argsort(durations[ready], kind="stable")]
            first = by_arrival[: federation.cohort_size]
            ready, seconds = np.sort(first), float(durations[first[-1]])
        clients = selected[ready]
        is_limited = num_steps[ready] < workload.num_steps[clients]
        return RoundPlan(
            clients=clients,
            num_selected=len(selected),
            num_steps=num_steps[ready] if is_limited.any() else None,
            seconds=seconds if self.has_clock else None,
        )

    def _count_transfer_seconds(self, workload: Workload) -> np.ndarray:
        """Return the seconds of the transfers of all clients in a round, float64 `[K]`."""
        return self._rates.transfer_seconds + self._rates.class_seconds * workload.num_classes

    def _draw_num_steps(
        self, workload: Workload, selected: np.ndarray, round_index: int
    ) -> np.ndarray:
        """Return the minibatches of selected clients, int64 `[n]`."""
        num_steps, partial_work = workload.num_steps[selected], self._partial_work
        if partial_work is None:
            return num_steps
        federation = self._federation
        rng = partial_work.make_rng(federation.seed, round_index)
        draws, shares = rng.random((2, federation.num_clients))[:, selected]
        shares = partial_work.min_share + (1 - partial_work.min_share) * shares
        shares = np.where(draws < partial_work.stragglers, shares, 1.0)
        fixed = workload.fixed_steps[selected]
        unit = self._get_unit(workload, selected, partial_work.unit)
        partial = np.ceil(shares * (num_steps - fixed) / unit - 1e-9).astype(np.int64) * unit
        return np.minimum(num_steps, fixed + partial)

    def _draw_failures(self, selected: np.ndarray, *path: int) -> np.ndarray:
        """Return whether each selected client fails, bool `[n]`."""
        if self._dropout is None:
            return np.zeros(len(selected), bool)
        rng = self._dropout.make_rng(self._federation.seed, *path)
        return rng.random(self._federation.num_clients)[selected] < self._dropout.probability

    def _fit_deadline(
        self, workload: Workload, selected: np.ndarray, num_steps: np.ndarray, times: _Times
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the minibatches that fit in the deadline, and whether any training does."""
        assert self._deadline is not None
        fixed = workload.fixed_steps[selected]
        unit = self._get_unit(workload, selected, "steps")
        seconds = self._deadline.seconds - times.transfer_seconds
        fitting = np.floor(seconds / np.maximum(times.step_seconds, 1e-300) + 1e-9)
        fitting = np.clip(fitting, 0, num_steps).astype(np.int64)
        training = np.maximum(fitting - fixed, 0) // unit * unit
        is_whole = fitting == num_steps
        is_ready = is_whole & (seconds >= 0) | (training > 0)
        return np.where(is_whole, num_steps, np.minimum(num_steps, fixed + training)), is_ready

    def _get_unit(self, workload: Workload, selected: np.ndarray, unit: str) -> np.ndarray:
        """Return the minibatches by which the work of selected clients is counted."""
        epoch_steps = np.maximum(workload.epoch_steps[selected], 1)
        if unit == "epochs" or not self._can_train_partly:
            return epoch_steps
        return np.ones_like(epoch_steps)


def _get_single(models: Iterable[SystemModel], kind: type[ModelT]) -> ModelT | None:
    """Return the only model of a class, or None."""
    return next((model for model in models if isinstance(model, kind)), None)


def _check_rates(device: DeviceModel, rates: DeviceRates, num_clients: int) -> None:
    """Raise ConfigError for times of devices that cannot be used."""
    name = f"{display_name('system')} {device.name!r}"
    if not isinstance(rates, DeviceRates):
        raise ConfigError(f"{name}: add_times returned {rates!r:.100}: expected DeviceRates")
    for field, values in rates._asdict().items():
        array = np.asarray(values)
        is_number = array.dtype.kind in "fiu"
        is_valid = (
            is_number
            and array.shape == (num_clients,)
            and np.isfinite(array).all()
            and (array >= 0).all()
        )
        if not is_valid:
            raise ConfigError(
                f"{name}: add_times returned {field} of shape {array.shape}: expected "
                f"{num_clients} finite numbers >= 0"
            )


def find_available(
    availability: AvailabilityModel, state: Any, federation: Federation, r: int, time: float
) -> tuple[np.ndarray, Any]:
    """Call `find_available` of a kind of availability, and check its result.

    Args:
      availability: the kind.
      state: its state after the previous round.
      federation: the clients.
      r: the round.
      time: simulated seconds since the start.

    Returns:
      Whether each client is available, bool `[K]`, and the new state.

    Raises:
      ConfigError: for another result.
    """
    result = _call(availability, availability.find_available, state, federation, r, time)
    is_available, state = _split_pair(availability, "find_available", result)
    array = np.asarray(is_available)
    if array.shape != (federation.num_clients,) or array.dtype != bool:
        raise ConfigError(
            f"{display_name('system')} {availability.name!r}: find_available returned {array.dtype} of shape "
            f"{array.shape}: expected {federation.num_clients} booleans"
        )
    return array, state


def find_next_time(availability: AvailabilityModel, state: Any, time: float) -> float:
    """Call `find_next_time` of a kind of availability, and check its result.

    Args:
      availability: the kind.
      state: its state after the previous round.
      time: simulated seconds since the start.

    Returns:
      The time, a finite number.

    Raises:
      ConfigError: for an earlier time, and another value.
    """
    result = _call(availability, availability.find_next_time, state, time)
    is_number = isinstance(result, numbers.Real)
    if not is_number or not time <= float(result) < math.inf:
        name = f"{display_name('system')} {availability.name!r}"
        raise ConfigError(
            f"{name}: find_next_time returned {result!r:.100}: expected a number >= {time:g}"
        )
    return float(result)


def select_clients(
    selection: ClientSelection,
    federation: Federation,
    available: np.ndarray,
    count: int,
    *path: int,
) -> np.ndarray:
    """Call `select` of a rule of selection, and check its result, see `ClientSelection.select`.

    Args:
      selection: the rule.
      federation: the clients.
      available: ids of the available clients, at least one.
      count: the largest number of clients.
      *path: the round, and the number of the draw in the round if it has several.

    Returns:
      The selected clients, int64 `[n]`.
    """
    selected = _call(selection, selection.select, federation, available, count, *path)
    return check_selected(selection, selected, available, count)


def _call(model: SystemModel, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of a kind, which may be a user's, and report its errors in one line."""
    return call_kind("system", model, function, *args, **kwargs)


def _split_pair(model: SystemModel, function: str, result: Any) -> tuple[Any, Any]:
    """Return the two items of a function's result."""
    if not isinstance(result, tuple) or len(result) != 2:
        name = f"{display_name('system')} {model.name!r}"
        expected = "expected two values, the second is the state"
        raise ConfigError(f"{name}: {function} returned {result!r:.100}: {expected}")
    return result


def check_selected(
    selection: SystemModel, selected: np.ndarray, available: np.ndarray, count: int
) -> np.ndarray:
    """Return the clients that a rule has selected, if they can be used.

    Args:
      selection: the rule.
      selected: ids of the selected clients.
      available: ids of the available clients.
      count: the largest number of clients.

    Returns:
      The selected clients, int64 `[n]`.

    Raises:
      ConfigError: for clients that are not available, repeated clients, and too many clients.
    """
    array = np.asarray(selected)
    is_valid = array.ndim == 1 and (array.dtype.kind in "iu" or not len(array))
    is_valid = is_valid and len(np.unique(array)) == len(array) <= count
    if not is_valid or not np.isin(array, available).all():
        raise ConfigError(
            f"{display_name('system')} {selection.name!r}: the selected clients are {array.tolist()!r:.100}: expected at "
            f"most {count} distinct ids of the {len(available)} available clients"
        )
    return array.astype(np.int64)


def validate_combination(models: Sequence[SystemModel]) -> None:
    """Check that kinds of system heterogeneity can be combined.

    Args:
      models: the kinds of a run.

    Raises:
      ConfigError: for two kinds of availability, two rules of selection, Poisson sampling with
        over-selection, two sources of the clients' speed, and a kind that needs simulated time
        where rounds have no duration.

    Example:
      >>> from fedjax_het.systems import Deadline, Speed, validate_combination
      >>> validate_combination([Speed(sigma=1), Deadline(seconds=10)])
    """
    for kind in (AvailabilityModel, ClientSelection | AdaptiveSelection):
        names = [model.name for model in models if isinstance(model, kind)]
        if len(names) > 1:
            raise ConfigError(
                f"{display_name('system')}: {' and '.join(names)}: expected one of them"
            )
    names = [m.name for m in models if isinstance(m, PoissonSampling | OverSelection)]
    if len(names) > 1:
        raise ConfigError(f"{display_name('system')}: {' and '.join(names)}: expected one of them")
    names = [model.name for model in models if isinstance(model, DeviceModel)]
    if "device_trace" in names and len(names) > 1:
        raise ConfigError(
            f"{display_name('system')}: {' and '.join(names)}: expected device_trace alone"
        )
    for model in models:
        if model.needs_clock and not names:
            raise ConfigError(
                f"{display_name('system')} {model.name}: expected speed, bandwidth or device_trace beside it, which "
                "give rounds a duration"
            )
