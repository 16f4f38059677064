"""Client selection by losses: against the rule by hand, and the sizes of its schedules."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from fedjax_het import ConfigError
from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.core.schedule import AdaptiveScheduler, RoundPlan, RoundSettings, Scheduler
from fedjax_het.core.work_items import ClientWork, Workload
from fedjax_het.data import partition_from_clients
from fedjax_het.systems import (
    AsynchronousSimulation,
    AvailabilityModel,
    CyclicSelection,
    DeviceTrace,
    Dropout,
    Federation,
    Oort,
    OverSelection,
    PoissonSampling,
    PowerOfChoice,
    SelectionBySize,
    Speed,
    SystemSimulation,
)

NUM_CLIENTS, COHORT_SIZE, NUM_ROUNDS = 20, 4, 12
SIZES = np.arange(NUM_CLIENTS)  # client 0 has no examples
FEDERATION = Federation(SIZES, COHORT_SIZE, seed=3, partition_seed=5)
WORKLOAD = Workload(SIZES, np.maximum(SIZES, 1), 0 * SIZES, 0 * SIZES)


def draw_losses(r):
    return np.random.default_rng(r).uniform(0.1, 2, NUM_CLIENTS).astype(np.float32)


def simulate(*models, rounds=NUM_ROUNDS):
    """Simulate rounds in which every client of a plan reports a loss."""
    simulation = SystemSimulation(models, FEDERATION)
    plans = simulation.simulate_rounds(lambda r: WORKLOAD, rounds)
    result = [next(plans)]
    for r in range(rounds - 1):
        losses = np.full(NUM_CLIENTS, np.nan, np.float32)
        losses[result[-1].clients] = draw_losses(r)[result[-1].clients]
        result.append(plans.send(losses))
    return result


@pytest.mark.parametrize("factor", [1.5, 3])
def test_power_of_choice_equals_the_rule_by_hand(factor):
    last_losses = dict.fromkeys(range(NUM_CLIENTS), float("inf"))
    num_known = 0
    for r, plan in enumerate(simulate(PowerOfChoice(factor=factor))):
        rng = make_host_rng(FEDERATION.seed, Stream.PARTICIPATION, r)
        clients = np.arange(1, NUM_CLIENTS)
        candidates = rng.choice(
            clients, int(factor * COHORT_SIZE), replace=False, p=clients / clients.sum()
        ).tolist()
        ranked = sorted(candidates, key=lambda k: (-last_losses[k], candidates.index(k)))
        assert set(plan.clients.tolist()) == set(ranked[:COHORT_SIZE])
        num_known += sum(np.isfinite(last_losses[k]) for k in candidates)
        last_losses |= {k: float(draw_losses(r)[k]) for k in plan.clients.tolist()}
    assert num_known > NUM_ROUNDS


def test_power_of_choice_between_its_limits():
    by_size = simulate(SelectionBySize())
    for plan, expected in zip(simulate(PowerOfChoice(factor=1)), by_size, strict=True):
        np.testing.assert_array_equal(plan.clients, expected.clients)
    # With all clients as candidates: first each client once, then the largest losses.
    plans = simulate(PowerOfChoice(factor=NUM_CLIENTS / COHORT_SIZE), rounds=6)
    last_losses = np.full(NUM_CLIENTS, -np.inf)
    for r, plan in enumerate(plans[:5]):
        last_losses[plan.clients] = draw_losses(r)[plan.clients]
    first_clients = np.concatenate([plan.clients for plan in plans[:4]])
    assert len(set(first_clients.tolist())) == 16
    assert set(range(1, NUM_CLIENTS)) - set(first_clients.tolist()) < set(plans[4].clients.tolist())
    largest = np.argsort(-last_losses)[:COHORT_SIZE]
    assert set(plans[5].clients.tolist()) == set(largest.tolist())


def test_clients_without_a_report_keep_their_loss():
    models = (Speed(), OverSelection(factor=1.5), Dropout(probability=0.3))
    plans = simulate(PowerOfChoice(factor=2), *models, rounds=30)
    assert {plan.num_selected for plan in plans} == {6}
    assert max(len(plan.clients) for plan in plans) <= COHORT_SIZE
    assert len(set(np.concatenate([plan.clients for plan in plans]).tolist())) > 15


@pytest.mark.parametrize("shortens_work", [False, True])
def test_sizes_of_schedules_hold_for_every_cohort(shortens_work):
    rng = np.random.default_rng(0)
    settings = RoundSettings(seed=0, num_rounds=40, participation=0.4)
    for lanes in (1, 3):
        sizes = rng.integers(0, 30, NUM_CLIENTS)
        offsets = np.cumsum([0, *sizes])
        partition = partition_from_clients([range(a, b) for a, b in itertools.pairwise(offsets)])
        work = ClientWork(partition, 1, batch_size=2)
        plans = []
        for _ in range(settings.num_rounds):
            clients = rng.choice(np.flatnonzero(sizes), 8, replace=False)
            steps = work.num_steps[clients]
            num_steps = rng.integers(1, steps + 1) if shortens_work else None
            plans.append(RoundPlan(clients, 8, num_steps))

        def start_plans(measure_losses, plans=plans):
            return (plan for plan in plans)

        arguments = (settings, 2, lanes)
        bound = AdaptiveScheduler(work, *arguments, start_plans, shortens_work=shortens_work)
        exact = Scheduler(work, *arguments, plans)
        assert all(a >= b for a, b in zip(bound.shape, exact.shape, strict=True))
        for _ in range(settings.num_rounds - 1):
            bound.plan_next_round(np.zeros(NUM_CLIENTS))
        for actual, expected in zip(bound.work_counts, exact.work_counts, strict=True):
            np.testing.assert_array_equal(actual, expected)
        for actual, expected in zip(
            bound.make_round(39, exact.shape), exact.make_round(39), strict=True
        ):
            np.testing.assert_array_equal(actual, expected)


def test_poisson_sampling_draws_each_client_with_the_probability():
    federation = Federation(np.ones(500), 50, seed=1, partition_seed=2, participation=0.1)
    rule, ids = PoissonSampling(), np.arange(500)
    rounds = np.zeros((400, 500), bool)
    for r in range(400):
        rounds[r, rule.select(federation, ids, 50, r)] = True
    # 200,000 draws; each client has a binomial number of rounds, and rounds are independent.
    assert abs(rounds.mean() - 0.1) < 4 * np.sqrt(0.09 / rounds.size)
    assert rounds.sum(1).var() == pytest.approx(500 * 0.09, rel=0.3)
    assert rounds.sum(0).var() == pytest.approx(400 * 0.09, rel=0.3)
    few = federation._replace(participation=0.001)
    assert sum(len(rule.select(few, ids, 50, r)) for r in range(100)) < 100
    only = rule.select(federation, np.array([3, 4]), 50, 0)
    assert set(only) <= {3, 4}


@pytest.mark.parametrize("model", [PoissonSampling(), OverSelection()])
def test_asynchronous_methods_refuse_kinds_of_rounds(model):
    with pytest.raises(ConfigError, match="expected a method with synchronous rounds"):
        AsynchronousSimulation([Speed(), model], FEDERATION, buffer_size=1, max_staleness=3)


def test_asynchronous_methods_refuse_selection_by_losses():
    with pytest.raises(ConfigError, match="system power_of_choice: expected a method with synchr"):
        AsynchronousSimulation([PowerOfChoice()], FEDERATION, buffer_size=1, max_staleness=1)


@dataclass(frozen=True, kw_only=True)
class FirstClients(AvailabilityModel):
    """In round r the first COUNTS[r] clients are available."""

    COUNTS: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, NUM_CLIENTS, 0)
    name: ClassVar[str] = "first_clients"
    strength: ClassVar[str] = "name"
    neutral: ClassVar[float | None] = None

    def start(self, federation):
        """Return no state."""

    def find_available(self, state, federation, round_index, time):
        """Return the first clients."""
        return np.arange(federation.num_clients) < self.COUNTS[round_index], state


@pytest.mark.parametrize(
    "selection",
    [None, SelectionBySize(), CyclicSelection(groups=3), PowerOfChoice(), Oort()],
    ids=lambda rule: getattr(rule, "name", "uniform"),
)
def test_rounds_with_few_available_clients(selection):
    models = [FirstClients(), *filter(None, [selection])]
    counts = FirstClients.COUNTS
    for plan, count in zip(simulate(*models, rounds=len(counts)), counts, strict=True):
        assert (plan.clients < count).all() and len(plan.clients) <= min(count, COHORT_SIZE)
        # All rules except the uniform one and the groups select clients with examples.
        if selection is None or count == NUM_CLIENTS:
            assert len(plan.clients) == min(count, COHORT_SIZE)
        elif not isinstance(selection, CyclicSelection):
            assert len(plan.clients) == max(count - 1, 0)
    if selection is None or isinstance(selection, SelectionBySize | CyclicSelection):
        settings = {"buffer_size": 2, "max_staleness": 5}
        simulation = AsynchronousSimulation(models, FEDERATION, **settings)
        plans = list(simulation.simulate_rounds(lambda r: WORKLOAD, len(counts)))
        assert len(plans) == len(counts) and len(plans[0].clients) == 0 < len(plans[4].clients)


@pytest.mark.parametrize("selection", [None, SelectionBySize(), PowerOfChoice(), Oort()])
def test_absent_clients_are_not_selected(selection):
    """A drift without absent clients changes nothing; with them, no rule selects them."""
    models = [Speed(sigma=1), *filter(None, [selection])]
    present = np.arange(NUM_CLIENTS) % 3 == 1

    def simulate_sizes(sizes):
        workload = WORKLOAD._replace(num_steps=sizes, sizes=sizes)
        plans = SystemSimulation(models, FEDERATION).simulate_rounds(lambda r: workload, 8)
        result = [next(plans)]
        for r in range(7):
            losses = np.full(NUM_CLIENTS, np.nan, np.float32)
            losses[result[-1].clients] = draw_losses(r)[result[-1].clients]
            result.append(plans.send(losses))
        return [plan.clients.tolist() for plan in result]

    assert simulate_sizes(SIZES) == [plan.clients.tolist() for plan in simulate(*models, rounds=8)]
    candidates = np.flatnonzero(present | (SIZES == 0))
    for r, clients in enumerate(simulate_sizes(np.where(present, SIZES, 0))):
        assert len(clients) == COHORT_SIZE and np.isin(clients, candidates).all()
        if selection is None:
            rng = make_host_rng(FEDERATION.seed, Stream.PARTICIPATION, r)
            assert clients == rng.choice(candidates, COHORT_SIZE, replace=False).tolist()


def test_traces_accept_paths(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("step_seconds\n0.5\n")
    assert DeviceTrace(path=path) == DeviceTrace(path=str(path))
