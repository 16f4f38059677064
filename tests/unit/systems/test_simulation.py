"""Simulated rounds: against durations by hand, and limits at which a kind changes nothing."""

import itertools

import numpy as np
import pytest

from fedjax_het import ConfigError
from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.core.work_items import ClientWork, Workload
from fedjax_het.data import partition_from_clients
from fedjax_het.systems import (
    AvailabilityTrace,
    Bandwidth,
    Bernoulli,
    CyclicSelection,
    DayNight,
    Deadline,
    DeviceTrace,
    Dropout,
    Federation,
    MarkovAvailability,
    OverSelection,
    PartialWork,
    SelectionBySize,
    Speed,
    SystemSimulation,
)

NUM_CLIENTS, COHORT_SIZE = 20, 8
SIZES = np.arange(1, NUM_CLIENTS + 1)
EPOCH_STEPS = 1 + SIZES // 4
FEDERATION = Federation(
    SIZES, COHORT_SIZE, seed=3, partition_seed=5, bytes_down=100.0, bytes_up=30.0
)
SPEED = Speed(sigma=0.7, step_seconds=2.0)


def make_workload(extra_passes=0, num_classes=0):
    fixed = extra_passes * EPOCH_STEPS
    classes = np.full(NUM_CLIENTS, num_classes)
    return Workload(5 * EPOCH_STEPS + fixed, EPOCH_STEPS, fixed, classes)


def simulate(*models, rounds=6, workload=None, federation=FEDERATION, **settings):
    simulation = SystemSimulation(models, federation, **settings)
    workload = workload or make_workload()
    return list(simulation.simulate_rounds(lambda r: workload, rounds))


def draw_speeds():
    """Seconds of a minibatch of each client, from the formula of the docstring."""
    rng = SPEED.make_rng(FEDERATION.partition_seed)
    return 2.0 * np.exp(0.7 * rng.standard_normal(NUM_CLIENTS))


def draw_cohort(r):
    """The cohort of a run without system heterogeneity."""
    rng = make_host_rng(FEDERATION.seed, Stream.PARTICIPATION, r)
    return rng.choice(NUM_CLIENTS, COHORT_SIZE, replace=False)


def assert_plans_equal(actual, expected):
    for plan, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(plan.clients, other.clients)
        np.testing.assert_array_equal(plan.num_steps, other.num_steps)
        assert plan.num_selected == other.num_selected and plan.seconds == other.seconds


def test_rounds_last_until_the_slowest_client():
    speeds, steps = draw_speeds(), make_workload().num_steps
    for r, plan in enumerate(simulate(SPEED)):
        cohort = draw_cohort(r)
        np.testing.assert_array_equal(plan.clients, cohort)
        assert plan.seconds == pytest.approx((speeds * steps)[cohort].max())
        assert plan.num_steps is None and plan.num_selected == COHORT_SIZE


@pytest.mark.parametrize("num_classes", [0, 3])
def test_transfers_take_bytes_over_bandwidth(num_classes):
    bandwidth = Bandwidth(sigma=0.0, upload=10.0, download=50.0)
    federation = FEDERATION._replace(bytes_up_per_class=20.0)
    workload = make_workload(num_classes=num_classes)
    plan = simulate(bandwidth, workload=workload, federation=federation)[0]
    assert plan.seconds == pytest.approx(100 / 50 + (30 + 20 * num_classes) / 10)


def test_deadline_drops_late_clients():
    speeds, steps = draw_speeds(), make_workload().num_steps
    limit = 40.0
    for r, plan in enumerate(simulate(SPEED, Deadline(seconds=limit))):
        cohort = draw_cohort(r)
        durations = (speeds * steps)[cohort]
        np.testing.assert_array_equal(plan.clients, cohort[durations <= limit])
        assert plan.seconds == pytest.approx(min(durations.max(), limit))


@pytest.mark.parametrize(("extra_passes", "can_train_partly"), [(0, True), (1, False)])
def test_late_clients_send_the_minibatches_that_fit(extra_passes, can_train_partly):
    speeds, workload, limit = draw_speeds(), make_workload(extra_passes), 20.0
    late = Deadline(seconds=limit, late="partial")
    plans = simulate(SPEED, late, workload=workload, can_train_partly=can_train_partly)
    num_partial = 0
    for r, plan in enumerate(plans):
        expected = {}
        for k in draw_cohort(r):
            fitting = min(int(limit / speeds[k] + 1e-9), workload.num_steps[k])
            fixed, unit = workload.fixed_steps[k], 1 if can_train_partly else EPOCH_STEPS[k]
            training = max(fitting - fixed, 0) // unit * unit
            if training > 0:
                expected[int(k)] = fixed + training
                num_partial += training + fixed < workload.num_steps[k]
        steps = workload.num_steps[plan.clients] if plan.num_steps is None else plan.num_steps
        assert dict(zip(plan.clients.tolist(), steps.tolist(), strict=True)) == expected
        assert plan.seconds <= limit
        assert plan.seconds == limit or len(expected) == COHORT_SIZE  # the server waits for all
    assert num_partial > 3


def test_over_selection_takes_the_first_to_arrive():
    speeds, steps = draw_speeds(), make_workload().num_steps
    for r, plan in enumerate(simulate(SPEED, OverSelection(factor=1.5))):
        rng = make_host_rng(FEDERATION.seed, Stream.PARTICIPATION, r)
        selected = rng.choice(NUM_CLIENTS, 12, replace=False)
        durations = np.sort((speeds * steps)[selected])
        assert plan.num_selected == 12 and len(plan.clients) == COHORT_SIZE
        assert sorted((speeds * steps)[plan.clients]) == durations[:COHORT_SIZE].tolist()
        assert plan.seconds == pytest.approx(durations[COHORT_SIZE - 1])


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_stragglers_do_a_drawn_share(unit):
    work = PartialWork(stragglers=0.5, min_share=0.2, unit=unit)
    workload = make_workload(extra_passes=1)
    plans = simulate(work, rounds=200, workload=workload)
    clients = np.concatenate([plan.clients for plan in plans])
    all_steps = workload.num_steps[clients]
    steps = np.concatenate(
        [workload.num_steps[p.clients] if p.num_steps is None else p.num_steps for p in plans]
    )
    units = EPOCH_STEPS[clients] if unit == "epochs" else np.ones_like(steps)
    training = steps - EPOCH_STEPS[clients]
    assert ((training % units == 0) & (training >= 0.2 * 5 * EPOCH_STEPS[clients])).all()
    # Five epochs: a straggler makes all of them with probability 1/4; shares of minibatches are
    # uniform, and rounded up.
    num_units = 1 if unit == "epochs" else EPOCH_STEPS[clients]
    full = 0.5 + 0.5 * 0.25 / num_units
    assert np.mean(steps == all_steps) == pytest.approx(np.mean(full), abs=0.04)


def test_dropout_loses_its_share_of_the_selected_clients():
    plans = simulate(Dropout(probability=0.3), rounds=300)
    assert all(np.isin(p.clients, draw_cohort(r)).all() for r, p in enumerate(plans))
    assert {p.num_selected for p in plans} == {COHORT_SIZE} and plans[0].seconds is None
    mean = np.mean([len(plan.clients) for plan in plans])
    assert mean == pytest.approx(0.7 * COHORT_SIZE, abs=0.25)


@pytest.mark.parametrize(
    ("model", "share", "repeat"),
    [
        (Bernoulli(probability=0.3), 0.3, 0.3),
        (MarkovAvailability(leave=0.1, join=0.3), 0.75, 0.9),
        (DayNight(share=0.25, period=100.0), 0.25, None),
    ],
)
def test_share_of_available_clients(model, share, repeat):
    federation = FEDERATION._replace(sizes=np.ones(4000, np.int64))
    state, masks = model.start(federation), []
    for r in range(4):
        available, state = model.find_available(state, federation, r, 7.0 * r)
        masks.append(available)
    assert np.mean(masks) == pytest.approx(share, abs=0.02)
    if repeat is not None:
        stays = np.concatenate([new[old] for old, new in itertools.pairwise(masks)])
        assert stays.mean() == pytest.approx(repeat, abs=0.02)


def test_server_waits_for_the_day():
    day_night = DayNight(share=0.25, period=100.0, spread=0.0)
    plans = simulate(Speed(sigma=0.0, step_seconds=1.0), day_night, rounds=3)
    steps = make_workload().num_steps
    time = 0.0
    for plan in plans:
        wait = 0.0 if time % 100 < 25 else 100 - time % 100
        assert len(plan.clients) == COHORT_SIZE
        assert plan.seconds == pytest.approx(wait + steps[plan.clients].max(), abs=1e-5)
        time += plan.seconds


def test_rounds_wait_for_the_intervals_of_a_trace(tmp_path):
    devices, intervals = tmp_path / "devices.csv", tmp_path / "intervals.csv"
    devices.write_text("step_seconds,upload\n1,30\n")
    intervals.write_text("device,start,end\na,10,20\nb,17,40\n")
    federation = FEDERATION._replace(sizes=np.ones(2, np.int64), cohort_size=2)
    ones = np.ones(2, np.int64)
    workload = Workload(4 * ones, ones, 0 * ones, 0 * ones)
    models = (DeviceTrace(path=str(devices)), AvailabilityTrace(path=str(intervals)))
    plans = simulate(*models, rounds=8, federation=federation, workload=workload)
    # Rounds of 4 + 30 / 30 s begin at 10, 15, 20, 25, 30, 35; the trace repeats at 40 and opens at
    # 50. Device b is alone from 20.
    seconds = [plan.seconds for plan in plans]
    assert seconds == pytest.approx([15, 5, 5, 5, 5, 5, 15, 5], abs=1e-5)
    assert [len(plan.clients) for plan in plans] == [1] * 8
    assert plans[0].clients == plans[1].clients != plans[2].clients


def test_devices_of_a_trace_repeat_after_all_are_drawn(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("step_seconds\n" + "\n".join(map(str, range(1, 11))))
    federation = FEDERATION._replace(cohort_size=1)
    ones = np.ones(NUM_CLIENTS, np.int64)
    workload = Workload(ones, ones, 0 * ones, 0 * ones)
    trace = DeviceTrace(path=str(path))
    plans = simulate(trace, rounds=300, federation=federation, workload=workload)
    speeds = {int(plan.clients[0]): plan.seconds for plan in plans}
    assert sorted(speeds.values()) == sorted([*range(1, 11)] * 2)


def test_names_of_columns_may_have_spaces(tmp_path):
    plans = []
    for name, separator in (("plain", ","), ("spaced", ", ")):
        path = tmp_path / f"{name}.csv"
        path.write_text(f"step_seconds{separator}upload\n2{separator}10\n")
        plans.append(simulate(DeviceTrace(path=str(path))))
    assert_plans_equal(*plans)
    assert plans[0][0].seconds == 2 * make_workload().num_steps[plans[0][0].clients].max() + 3


def test_selection_by_size_prefers_large_clients():
    federation = FEDERATION._replace(cohort_size=1)
    plans = simulate(SelectionBySize(power=1.0), rounds=3000, federation=federation)
    counts = np.bincount(np.concatenate([p.clients for p in plans]), minlength=NUM_CLIENTS)
    expected = 3000 * SIZES / SIZES.sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_groups_take_part_in_turn():
    plans = simulate(CyclicSelection(groups=2), rounds=40)
    groups = [set(np.concatenate([p.clients for p in plans[g::2]]).tolist()) for g in range(2)]
    assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == NUM_CLIENTS


@pytest.mark.parametrize(
    "model",
    [
        Deadline(seconds=1e30),
        Deadline(seconds=1e30, late="partial"),
        OverSelection(factor=1.0),
        Dropout(probability=0.0),
        Bernoulli(probability=1.0),
        MarkovAvailability(leave=0.0),
        MarkovAvailability(leave=0.0, join=0.0),
        DayNight(share=1.0),
        PartialWork(stragglers=0.0),
        PartialWork(min_share=1.0),
        CyclicSelection(groups=1),
    ],
    ids=lambda model: f"{model.name} {getattr(model, model.strength)}",
)
def test_limits_change_no_round(model):
    assert_plans_equal(simulate(SPEED, model), simulate(SPEED))


def test_first_rounds_do_not_depend_on_the_number_of_rounds():
    models = (SPEED, MarkovAvailability(), Dropout(), PartialWork())
    assert_plans_equal(simulate(*models, rounds=3), simulate(*models, rounds=9)[:3])


def test_partial_work_is_the_first_part_of_the_minibatches():
    work = ClientWork(partition_from_clients([range(7), range(7, 12)]), 3, batch_size=2)
    whole, sizes = work.draw_batches(0, 0, np.array([0, 1]))
    part = work.with_num_steps(np.array([0, 1]), np.array([6, 2]))
    batches, part_sizes = part.draw_batches(0, 0, np.array([0, 1]))
    rows = [*range(6), *range(12, 14)]
    np.testing.assert_array_equal(batches, whole[rows])
    np.testing.assert_array_equal(part_sizes, sizes[rows])
    assert part.num_samples.tolist() == [sizes[:6].sum(), sizes[12:14].sum()]
    assert work.num_steps.tolist() == [12, 9]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([Deadline()], "system deadline: expected speed, bandwidth or device_trace beside it"),
        ([Bernoulli(), MarkovAvailability()], "system: availability and markov: expected one"),
        ([SPEED, DeviceTrace(path="x.csv")], "expected device_trace alone"),
        ([CyclicSelection(groups=21)], "system cyclic_selection:groups = 21: expected at most 20"),
    ],
)
def test_combinations_that_are_refused(models, message):
    with pytest.raises(ConfigError, match=message):
        simulate(*models)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seconds\n1\n", "expected the column step_seconds; the file has seconds"),
        ("step_seconds\n1\n0\n", "row 2 has 0: expected numbers above 0"),
        ("step_seconds\nfast\n", "row 1 has 'fast': expected numbers above 0"),
        ("", "no CSV file"),
        ("start,end\n0,5\n", "expected the column device; the file has start, end"),
        ("device,start,end\na,0,5\n,1,2\n", "column device: row 2 is empty"),
        ("device,start,end\n1,0,5\na,5,2\n", "row 2 has start 5, end 2: expected an end after"),
        ("step_seconds\n0.1,5\n", "more values: expected 1 values in each row"),
        ("step_seconds,upload\n0.1,5\n0.1,5,7\n", "no CSV file: .*Expected 2 fields in line 3"),
        ("step_seconds,upload\n0.1\n", "column upload: row 1 has nan: expected numbers above 0"),
        ("step_seconds,Upload\n1,2\n", "'Upload': expected one of step_seconds, upload, download"),
        ("step_seconds, upload ,upload\n1,2,3\n", "expected the column upload once; the file has"),
    ],
)
def test_bad_traces_are_one_line(tmp_path, text, message):
    path = tmp_path / "devices.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        if "end" in text:
            simulate(SPEED, AvailabilityTrace(path=str(path)))
        else:
            simulate(DeviceTrace(path=str(path)))
