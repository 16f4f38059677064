"""Drifts: which examples and clients are active in which phase and round."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_het import ConfigError, RunSpec, dataset_from_arrays, simulate
from fedjax_het.algorithms.class_counts import CLASS_COUNTS, select_class_counts
from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.core.schedule import RoundSettings, Scheduler
from fedjax_het.core.work_items import ClientWork, DriftingWork
from fedjax_het.data import partition_from_clients
from fedjax_het.methods import Cohort, FederationData
from fedjax_het.skews import ClassArrival, ClientChurn, LabelDrift
from fedjax_het.skews.assignment import select_active
from fedjax_het.skews.drift import NUM_PHASES

NUM_CLASSES, NUM_CLIENTS, SIZE = 5, 6, 100
LABELS = np.random.default_rng(0).integers(0, NUM_CLASSES, NUM_CLIENTS * SIZE)
CLIENTS = np.arange(NUM_CLIENTS * SIZE).reshape(NUM_CLIENTS, SIZE)
PARTITION = partition_from_clients(CLIENTS)
ABSENT = partition_from_clients([own[: SIZE * (k % 3 > 0)] for k, own in enumerate(CLIENTS)])


def select(*skews, seed=1):
    return select_active(skews, PARTITION, LABELS, NUM_CLASSES, seed, num_rounds=50)


def test_windows_slide_over_the_classes():
    drift = select(LabelDrift(width=0.4, rounds=20))
    mixtures = np.array(
        [part.label_counts(LABELS, NUM_CLASSES) / part.sizes[:, None] for part in drift.partitions]
    )
    for part in drift.partitions:
        assert (part.sizes == 40).all()
        for k in range(NUM_CLIENTS):
            assert np.isin(part.client_indices(k), PARTITION.client_indices(k)).all()
    seen = [
        np.unique(np.concatenate([part.client_indices(k) for part in drift.partitions]))
        for k in range(NUM_CLIENTS)
    ]
    assert [len(own) for own in seen] == [SIZE] * NUM_CLIENTS  # all examples are used once
    steps = np.abs(np.diff(mixtures, axis=0)).sum(-1).mean()
    ends = np.abs(mixtures[-1] - mixtures[0]).sum(-1).mean()
    assert ends > 1.5 > 0.5 > steps  # far apart at the ends, close from phase to phase


def test_classes_arrive():
    drift = select(ClassArrival(initial=0.2, rounds=20))
    counts = [(p.label_counts(LABELS, NUM_CLASSES).sum(0) > 0).sum() for p in drift.partitions]
    assert counts[0] == 1 and counts[-1] == NUM_CLASSES and (np.diff(counts) >= 0).all()
    assert drift.partitions[-1].digest() == PARTITION.digest()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_clients_join_and_leave(share):
    drift = select(ClientChurn(share=share, rounds=20))
    present = np.array([part.sizes > 0 for part in drift.partitions])  # [phases, K]
    changes = np.abs(np.diff(present.astype(int), axis=0)).sum(0)
    assert (changes == 1).sum() == round(share * NUM_CLIENTS)
    assert (changes == 0).sum() == NUM_CLIENTS - round(share * NUM_CLIENTS)
    always = present.all(0)
    assert (present[0] | present[-1])[~always].all()


def test_class_counts_follow_the_drift():
    images = np.zeros((len(LABELS), 2, 2, 1), np.uint8)
    dataset = dataset_from_arrays(images, LABELS, images[:5], np.arange(5))
    drifts = [select(LabelDrift(rounds=20)), None]  # two runs of a sweep
    inputs = CLASS_COUNTS.make_inputs(
        [FederationData(dataset, PARTITION, None, 1, seed=0, drift=drift) for drift in drifts]
    )
    for drift, own in zip(drifts, inputs, strict=True):
        for r in (0, 1, 2, 19, 20, 500):
            active = PARTITION if drift is None else drift.partitions[drift.get_phase(r)]
            cohort = Cohort(SimpleNamespace(round=r), None, inputs={CLASS_COUNTS.name: own})
            np.testing.assert_array_equal(
                select_class_counts(cohort), active.label_counts(LABELS, NUM_CLASSES)
            )


def test_phases_of_rounds():
    drift = select(LabelDrift(rounds=20))
    assert [drift.get_phase(r) for r in (0, 1, 2, 19, 20, 500)] == [0, 0, 1, 9, 9, 9]
    assert len(drift.partitions) == NUM_PHASES


def test_a_drift_lasts_for_the_run_by_default():
    settings = {"model": "mlp", "rounds": 20}
    specs = [
        RunSpec(**settings, skew=skew).resolved()
        for skew in (["drift"], ["drift:rounds=20"], ["drift:width=0.5,rounds=10", "churn"])
    ]
    assert specs[0] == specs[1] and specs[0].skew == {"drift.rounds": 20, "drift.width": 0.5}
    assert [specs[2].skew[f"{name}.rounds"] for name in ("drift", "churn")] == [10, 20]


def test_drifts_combine_by_intersection():
    arrival, churn = ClassArrival(initial=0.2), ClientChurn(share=1.0)
    both, one, other = select(arrival, churn), select(arrival), select(churn)
    for phase in range(NUM_PHASES):
        for k in range(NUM_CLIENTS):
            parts = [drift.partitions[phase].client_indices(k) for drift in (both, one, other)]
            np.testing.assert_array_equal(parts[0], np.intersect1d(*parts[1:]))
    with pytest.raises(ConfigError, match=r"skew rounds = \[20, 50\]: expected one number"):
        select(LabelDrift(rounds=20), churn)


def test_run_trains_on_active_clients():
    settings = {"model": "mlp", "num_clients": 6, "rounds": 10, "local_epochs": 1, "alpha": 0.5}
    plain, churning = (
        simulate(RunSpec(**settings, skew=skew)) for skew in (None, "churn:share=1,rounds=10")
    )
    num_clients = churning.metrics["bytes_up"] / (plain.metrics["bytes_up"] / 6)
    assert num_clients.min() < 6 and (num_clients == np.rint(num_clients)).all()
    assert (plain.metrics["bytes_up"] == plain.metrics["bytes_up"][0]).all()


def test_cohorts_are_drawn_among_the_clients_that_are_present():
    work = [ClientWork(part, 1, batch_size=10) for part in (PARTITION, ABSENT)]
    drifting = DriftingWork(work, lambda r: r % 2, PARTITION)
    settings = RoundSettings(seed=3, num_rounds=6, participation=0.5)
    cohorts = [
        [scheduler.draw_cohort(r).tolist() for r in range(6)]
        for scheduler in (Scheduler(work[0], settings, 1, 1), Scheduler(drifting, settings, 1, 1))
    ]
    assert cohorts[1][::2] == cohorts[0][::2]
    for r in (1, 3, 5):
        rng = make_host_rng(3, Stream.PARTICIPATION, r)
        assert cohorts[1][r] == rng.choice([1, 2, 4, 5], 3, replace=False).tolist()


@pytest.mark.parametrize("skew", ["drift", "noise", "label_noise"])
def test_server_data_of_clients_excludes_skews(skew):
    message = rf"skew = '{skew}': expected skews of numbers of examples: clients of data_sharing"
    with pytest.raises(ConfigError, match=message):
        RunSpec("data_sharing", model="mlp", num_clients=4, rounds=2, skew=skew)
    RunSpec("data_sharing", model="mlp", skew="quantity:alpha=0.5")
