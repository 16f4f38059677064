"""FedBuff and FedAsync: float64 loops over simulated arrivals, and their limits."""

import numpy as np
import pytest
from support.algorithm_builders import bind_options
from support.data import BATCH_SIZE
from support.reference_loop import ReferenceFedAvg, run_and_compare
from support.small_federation import make_small_federation
from support.small_runs import KilledError, assert_results_equal, make_killing_callback

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.algorithms.fedasync import FedAsyncHyperParameters, fedasync
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedbuff import fedbuff
from fedjax_het.config.protocols import PROTOCOLS
from fedjax_het.core.work_items import Workload
from fedjax_het.systems import AsynchronousSimulation, Federation, Speed

SIZES = (7, 12, 5, 9, 16)
SPEED = Speed(sigma=0.8, step_seconds=1.0)
EPOCHS = 2


def simulate_arrivals(loop, buffer_size, rounds, max_staleness):
    """Clients, staleness and time of each change of the model, if all clients always train.

    A client whose update is in the buffer waits for the change of the model.
    """
    factors = np.exp(0.8 * SPEED.make_rng(0).standard_normal(len(SIZES)))
    steps = np.array([EPOCHS * -(-size // BATCH_SIZE) for size in SIZES])
    ends, versions = factors * steps, np.zeros(len(SIZES), int)
    changes, buffer = [], []
    while len(changes) < rounds:
        k = int(np.argmin(ends))
        time, staleness = ends[k], len(changes) - versions[k]
        if staleness > max_staleness:
            restarted = [k]
        else:
            buffer.append((k, staleness))
            ends[k], restarted = np.inf, []
        if len(buffer) == buffer_size:
            changes.append((dict(buffer), time))
            restarted, buffer = [k for k, _ in buffer], []
        for k in restarted:
            ends[k], versions[k] = time + factors[k] * steps[k], len(changes)
    return changes


class Buffered(ReferenceFedAvg):
    """FedBuff's Algorithm 1: changes from the models that the clients received."""

    buffer_size, max_staleness = 2, 20

    def before_round(self, r):
        if r == 0:
            arguments = (self.buffer_size, 12, self.max_staleness)
            self.changes, self.vectors = simulate_arrivals(self, *arguments), []
        self.vectors.append(self.global_vector)
        self.staleness = self.changes[r][0]
        self.received = {k: self.vectors[r - lag] for k, lag in self.staleness.items()}

    def compute_weight(self, staleness):
        return (1 + staleness) ** -self.hp["staleness_exponent"]

    def initial_client_model(self, client):
        return self.received[client]

    def get_origin(self, client):
        return self.received[client]

    def update_server(self, r, clients, models):
        assert clients == sorted(self.staleness)
        changes = [
            self.compute_weight(self.staleness[k]) * (model - self.get_origin(k))
            for k, model in zip(clients, models, strict=True)
        ]
        mean = self.weighted_mean(clients, changes)
        self.global_vector = self.global_vector + self.hp["server_lr"] * mean


class Async(Buffered):
    """FedAsync's Algorithm 1: a mixture of the present model and the client's."""

    buffer_size = 1

    def get_origin(self, client):
        return self.global_vector

    def descent_direction(self, model, batch):
        pull = self.hp["prox_mu"] * (model - self.received[batch.client])
        return super().descent_direction(model, batch) + pull


class Hinge(Async):
    def compute_weight(self, staleness):
        return 1 if staleness <= 1 else 1 / (2 * (staleness - 1) + 1)


CASES = {
    "fedbuff": (bind_options(fedbuff, buffer_size=2), {"server_lr": 0.8}, Buffered),
    "discards": (
        bind_options(fedbuff, buffer_size=1, max_staleness=2),
        {"server_lr": 0.8},
        type("Discards", (Buffered,), {"buffer_size": 1, "max_staleness": 2}),
    ),
    "fedasync": (bind_options(fedasync), {"server_lr": 0.6, "prox_mu": 0.3}, Async),
    "hinge": (
        bind_options(fedasync, staleness_weight="hinge"),
        {"server_lr": 0.6, "prox_mu": 0.3, "hinge_slope": 2.0, "hinge_delay": 1.0},
        Hinge,
    ),
}


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
@pytest.mark.parametrize("name", CASES)
def test_rounds_match_float64_loop(name, averaging):
    build, hp, make_loop = CASES[name]
    federation = make_small_federation(
        build,
        hp={"local_lr": 0.2, "staleness_exponent": 0.7, **hp},
        sizes=SIZES,
        averaging=averaging,
        epochs=EPOCHS,
        systems=(SPEED,),
        rounds=12,
    )
    loop = make_loop(federation)
    run_and_compare(loop, 12, atol=1e-5)
    staleness = {lag for change, _ in loop.changes for lag in change.values()}
    assert max(staleness) >= 2
    seconds = np.cumsum(federation.scheduler.work_counts.seconds)
    np.testing.assert_allclose(seconds, [time for _, time in loop.changes])


def test_equal_speeds_and_a_buffer_of_the_cohort_are_fedavg():
    settings = {
        **{"model": "mlp", "partition": "iid", "num_clients": 10, "participation": 0.5},
        **{"rounds": 4, "learning_rate": 0.1},
    }
    plain = simulate(RunSpec("fedavg", **settings))
    buffered = simulate(RunSpec("fedbuff", **settings, options={"buffer_size": 5}))
    for name in plain.metrics:
        np.testing.assert_array_equal(buffered.metrics[name], plain.metrics[name], err_msg=name)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_protocols_leave_the_papers_hyperparameters(protocol):
    hp = RunSpec("fedasync", "digits", protocol=protocol).resolved().hyperparameters
    assert hp["prox_mu"] == FedAsyncHyperParameters().prox_mu
    assert hp["server_lr"] == FedAsyncHyperParameters().server_lr


def test_fedasync_with_one_client_and_weight_1_is_fedavg():
    hp = {"local_lr": 0.2, "server_lr": 1.0, "prox_mu": 0.0, "staleness_exponent": 0.5}
    one, other = (
        make_small_federation(build, hp=hp, sizes=(9,), rounds=4).train(4)
        for build in (bind_options(fedasync), fedavg)
    )
    np.testing.assert_allclose(one["w"], other["w"], atol=1e-6)


@pytest.mark.slow
def test_initial_model_of_a_file_is_the_first_received_model(tmp_path):
    settings = {"model": "mlp", "num_clients": 4, "rounds": 1, "learning_rate": 0.1}
    path = simulate(RunSpec("fedavg", **settings)).save_model(tmp_path / "model")
    settings |= {"init_from": str(path), "partition": "iid"}
    plain = simulate(RunSpec("fedavg", **settings))
    buffered = simulate(RunSpec("fedbuff", **settings, options={"buffer_size": 4}))
    np.testing.assert_array_equal(buffered.metrics["test_accuracy"], plain.metrics["test_accuracy"])


def test_clients_without_examples_fill_no_buffer():
    settings = {"buffer_size": 2, "max_staleness": 5}
    federation = Federation(np.array([0, 4, 0, 8, 0]), 3, seed=0, partition_seed=0)
    simulation = AsynchronousSimulation([SPEED], federation, **settings)
    steps = np.array([0, 1, 0, 2, 0])
    workload = Workload(steps, steps, 0 * steps, 0 * steps)
    for plan in simulation.simulate_rounds(lambda r: workload, 4):
        assert sorted(plan.clients) == [1, 3] and plan.seconds > 0


def test_resume_is_bit_equal(eager, tmp_path):
    spec = RunSpec(
        "fedbuff",
        model="mlp",
        num_clients=8,
        participation=0.5,
        rounds=6,
        system=["speed:sigma=1", "availability:probability=0.7", "dropout:probability=0.2"],
        options={"buffer_size": 2},
    )
    whole = simulate(spec)
    with pytest.raises(KilledError):
        simulate(spec, output_dir=tmp_path, progress=make_killing_callback(1))
    assert (tmp_path / "checkpoint.npz").exists()
    assert_results_equal(simulate(spec, output_dir=tmp_path, resume=True), whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"buffer_size": 6}}, "buffer_size = 6: expected at most 5, the number of cl"),
        ({"system": ["speed", "deadline"]}, "deadline: expected a method with synchronous rounds"),
        ({"system": "dropout:probability=1"}, "dropout:probability = 1.0: expected at most 0.999"),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    spec = RunSpec("fedbuff", model="mlp", num_clients=5, rounds=2, **settings)
    with pytest.raises(ConfigError, match=message):
        simulate(spec)
